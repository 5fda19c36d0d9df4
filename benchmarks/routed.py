"""Kept heads alone, each input its own, against the dense model: seconds, with what the answers lose beside them.

    python -m benchmarks.routed [--quick] [--routers FOLDER] [--out routed.md]

A ViT-B-sized and a GPT-2-small-sized model with random weights, and routers of the real size with random weights; with
`--routers` also the trained digits-12 with trained routers, one sub-folder for each. Timed are the attention sublayer
of the middle block (norm, queries, keys, values, attention, projection) and the whole model with every layer routed,
the routers' own time included. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean

import torch
from benchmarks.cases import CASES, Case
from benchmarks.timing import machine, median_seconds_in_turn
from torch import Tensor

import understudy as us
from understudy.anatomy import Anatomy, anatomy
from understudy.capture import capture
from understudy.divergence import kl, probabilities
from understudy.identity import fingerprint
from understudy.inputs.batch import Batch
from understudy.outcome import resolve
from understudy.routing.compact import Choose, compact
from understudy.routing.network import RouterNetwork
from understudy.routing.online import routed
from understudy.routing.residual import places, summarize
from understudy.routing.router import Card, Router

TRAINED = "digits-12"
TITLES = {
    "vit": "ViT-B-sized, 197 tokens, random weights",
    "gpt2": "GPT-2-small-sized, 128 tokens, random weights",
    TRAINED: "digits-12, 17 tokens, trained, with trained routers",
}
NORMS = ("layernorm_before", "ln_1")  # before the attention, of ViT and GPT-2
REPEATS = {1: 31, 8: 11, 64: 5}

Routers = Mapping[int, Router]  # by layer


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds are medians of alternated calls."""

    model: str
    part: str
    batch: int
    keep: int
    heads: int
    dense: float
    routed: float  # with its router
    router: float  # alone
    kl: float
    fidelity: float
    subsets: float  # different ones among the inputs, mean over the layers


def random_routers(case: Case, inputs: int = 8) -> dict[int, Router]:
    """A router for each layer, with random weights that tell inputs apart: the cost is that of a trained one."""
    torch.manual_seed(0)
    body, batch = anatomy(case.model), _first(case.batch, inputs)
    outcome, known = resolve(body, "auto"), fingerprint(body)
    taken = capture(body, batch, range(len(body.layers)))
    found = {}
    for index, layer in enumerate(body.layers):
        z = summarize(taken.sites[index].residual, places(body, batch, outcome, taken.tokens))
        network = RouterNetwork(z.shape[1], layer.units).eval()
        # As in training, summaries are standardized; and what is said of two inputs must differ for their heads to.
        network.mean.copy_(z.mean(0))
        network.scale.copy_(z.std(0) + 1e-6)
        network.encoder[-1].weight *= 10
        network.heads.weight *= 10
        card = Card(case.name, known, index, layer.units, z.shape[1] // 3, outcome, (), "random", 0)
        found[index] = Router(network, card)
    return found


def trained_routers(folder: Path) -> dict[int, Router]:
    """The routers in the sub-folders of a folder."""
    found = [Router.load(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    by_layer = {one.card.layer: one for one in found}
    if len(by_layer) != len(found):
        raise SystemExit(f"{folder} holds several routers for one layer: give one for each.")
    return by_layer


def digits(inputs: int) -> Case:
    """The bundled model of twelve heads, on digits that it has never seen."""
    model, shown = us.load(TRAINED), us.digits(inputs)
    pixels = {"pixel_values": shown.batch(range(inputs))["pixel_values"]}
    return Case(TRAINED, TITLES[TRAINED], model, pixels, 0, model.config.num_attention_heads, "classes")


def rows(
    case: Case, routers: Routers, *, batches: Sequence[int], keeps: Sequence[int], repeats: int | None = None
) -> Iterator[Row]:
    """The lines of one model. KL and fidelity are of all its inputs, whatever the size of the batch that is timed."""
    # Two models, so that the routed one can stay as it is while both are timed in turn.
    dense, body = anatomy(copy.deepcopy(case.model)), anatomy(case.model)
    middle = sorted(routers)[len(routers) // 2]
    every = "model" if len(routers) == len(body.layers) else f"model, layer {', '.join(map(str, sorted(routers)))}"
    logits = dense.run(case.batch).logits
    for keep in keeps:
        for name, timed, layers in ((f"sublayer {middle}", _sublayer, [middle]), (every, _whole, sorted(routers))):
            own = {layer: routers[layer] for layer in layers}
            with routed(body.model, [*own.values()], keep=keep, execution="compact") as chosen:
                lost = _lost(logits, body.run(case.batch).logits)
            lost["subsets"] = mean(len(chosen.of(layer).unique(dim=0)) for layer in own)
            for size in batches:
                times = repeats or REPEATS.get(size, 5)
                seconds = timed(dense, body, _first(case.batch, size), own, keep, times)
                yield Row(case.name, name, size, keep, case.heads, **seconds, **lost)


def _sublayer(
    dense: Anatomy, body: Anatomy, batch: Batch, routers: Routers, keep: int, repeats: int
) -> dict[str, float]:
    """Norm and attention of one layer, on its own input."""
    ((layer, router),) = routers.items()
    residual = capture(dense, batch, [layer]).sites[layer].residual
    norm = next(getattr(body.layers[layer].block, name) for name in NORMS if hasattr(body.layers[layer].block, name))
    attention, part = dense.layers[layer].attention, compact(body, layer)
    choose = _choose(body, router, batch, keep)
    return _timed(
        {
            "dense": lambda: attention(norm(residual)),
            "routed": lambda: part.run(norm(residual), choose(residual)),
            "router": lambda: choose(residual),
        },
        repeats,
    )


def _whole(dense: Anatomy, body: Anatomy, batch: Batch, routers: Routers, keep: int, repeats: int) -> dict[str, float]:
    """The whole model."""
    residuals = {layer: site.residual for layer, site in capture(dense, batch, routers).sites.items()}
    choosers = {layer: _choose(body, one, batch, keep) for layer, one in routers.items()}
    with routed(body.model, [*routers.values()], keep=keep, execution="compact"):
        return _timed(
            {
                "dense": lambda: dense.run(batch),
                "routed": lambda: body.run(batch),
                "router": lambda: [choose(residuals[layer]) for layer, choose in choosers.items()],
            },
            max(3, repeats // 3),
        )


def _choose(body: Anatomy, router: Router, batch: Batch, keep: int) -> Choose:
    """What `routed` does before a block."""

    def choose(residual: Tensor) -> Tensor:
        z = summarize(residual, places(body, batch, router.card.outcome, residual.shape[1]))
        return router.choose(z, keep).nonzero()[:, 1].view(len(z), -1)

    return choose


def error(case: Case, routers: Routers, keep: int, inputs: int = 8) -> tuple[float, float]:
    """The largest difference of the logits to the other heads set to zero, all routed, over the largest logit.

    Of the inputs for which both chose the same heads in every layer, whose share comes second: rounding alone turns a
    choice between two subsets that are as good as each other, and random routers know many.
    """
    body, batch = anatomy(case.model), _first(case.batch, inputs)
    answers, masks = [], []
    for execution in ("compact", "gated"):
        with routed(body.model, [*routers.values()], keep=keep, execution=execution) as chosen:
            answers.append(body.run(batch).logits)
        masks.append(torch.stack([chosen.of(layer) for layer in routers], 1))  # [inputs, layers, heads]
    found, truth = answers
    same = (masks[0] == masks[1]).flatten(1).all(1)
    largest = float((found - truth)[same].abs().max() / truth.abs().max()) if bool(same.any()) else float("nan")
    return largest, float(same.double().mean())


def _first(batch: Batch, size: int) -> Batch:
    return {name: value[:size] for name, value in batch.items()}


def _timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for call in calls.values():
        call()
    return median_seconds_in_turn(calls, repeats)


def _lost(dense: Tensor, logits: Tensor) -> dict[str, float]:
    """Mean KL to the dense model, and the share of distributions whose most likely class is the dense model's."""
    same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(dense, logits, strict=True)])
    each = torch.cat([kl(a, probabilities(a), b).flatten() for a, b in zip(dense, logits, strict=True)])
    return {"kl": float(each.mean()), "fidelity": float(same.double().mean())}


def markdown(found: Sequence[Row]) -> str:
    """A table for each model."""
    blocks = []
    for model in dict.fromkeys(row.model for row in found):
        own = [row for row in found if row.model == model]
        head = ("part", "batch", f"K of {own[0].heads}", "dense ms", "routed ms", "router ms in it", "of dense")
        lines = [(*head, "faster", "KL", "fidelity", "subsets"), ("---",) * (len(head) + 4), *map(_line, own)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        blocks.append(f"### {TITLES.get(model, model)}\n\n{table}")
    return "\n\n".join(blocks)


def _line(row: Row) -> tuple[str, ...]:
    ratio = row.routed / row.dense
    seconds = (f"{1e3 * value:.1f}" for value in (row.dense, row.routed, row.router))
    verdict = "yes" if ratio < 1 else "**no**"
    return (
        *(row.part, str(row.batch), str(row.keep), *seconds, f"{ratio:.2f}", verdict),
        *(f"{row.kl:.3g}", f"{row.fidelity:.1%}", f"{row.subsets:.1f}"),
    )


def main() -> None:
    """Print a table for each model, and the difference to gates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="K = 3 at batches of 1 and 8, few repetitions")
    parser.add_argument("--tiny", action="store_true", help="miniatures, to see that everything runs")
    parser.add_argument("--model", choices=TITLES, action="append")
    parser.add_argument("--routers", type=Path, help=f"a folder of trained routers for {TRAINED}, one sub-folder each")
    parser.add_argument("--batch", type=int, action="append", help="1, 8 and 64 by default")
    parser.add_argument("--keep", type=int, action="append", help="3, 6 and 9 by default")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    names = options.model or [name for name in TITLES if name != TRAINED or options.routers]
    if TRAINED in names and options.routers is None:
        parser.error(f"{TRAINED} is timed with trained routers: give their folder by --routers")
    batches = options.batch or ([1, 8] if options.quick or options.tiny else [1, 8, 64])
    keeps = options.keep or ([1, 2] if options.tiny else [3] if options.quick else [3, 6, 9])
    repeats = options.repeats or (5 if options.quick or options.tiny else None)
    inputs = max(*batches, 8)
    found: list[Row] = []
    errors = []
    with torch.no_grad():
        for name in names:
            if name == TRAINED:
                case, routers = digits(len(us.digits())), trained_routers(options.routers)
            else:
                case = CASES[name](tiny=options.tiny, inputs=inputs)
                routers = random_routers(case)
            apart, same = zip(*(error(case, routers, keep) for keep in keeps), strict=True)
            errors.append(f"{max(apart):.0e} ({name}, {min(same):.1%} of the inputs)")
            for row in rows(case, routers, batches=batches, keeps=keeps, repeats=repeats):
                found.append(row)
                print(*(getattr(row, field.name) for field in fields(row)), file=sys.stderr)
    over = f"{inputs} inputs" + (f" ({len(us.digits())} of {TRAINED})" if TRAINED in names else "")
    named = ", ".join(f"{key} {value}" for key, value in machine().items())
    page = (
        f"{markdown(found)}\n\nWhere both choose the same heads, the logits differ from those with the other heads set "
        f"to zero by at most {', '.join(errors)} of the largest, all routers at once. KL and fidelity are means over "
        f"{over}; where weights and routers are random, they belong to these, not to a trained router. Subsets: how "
        "many different ones the inputs kept, mean over the layers."
        f"\n\n*{named}.*\n"
    )
    print(page)
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
