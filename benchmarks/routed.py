"""Kept heads alone, each input its own, against the dense model: seconds, with what the answers lose beside them.

    python -m benchmarks.routed [--quick] [--out routed.md]

A ViT-B-sized and a GPT-2-small-sized model with random weights; the attention sublayer of the middle block (norm,
queries, keys, values, attention, projection) and the whole model with every layer routed. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from benchmarks.cases import CASES, Case
from benchmarks.timing import machine, median_seconds_in_turn
from torch import Tensor, nn

from understudy.anatomy import Anatomy, anatomy
from understudy.capture import capture
from understudy.divergence import kl, probabilities
from understudy.gates import spread
from understudy.inputs.batch import Batch
from understudy.routing.compact import Choose, Way, compact, compacted
from understudy.surgery import hooked

TITLES = {"vit": "ViT-B-sized, 197 tokens", "gpt2": "GPT-2-small-sized, 128 tokens"}
NORMS = ("layernorm_before", "ln_1")  # before the attention, of ViT and GPT-2
REPEATS = {1: 31, 8: 11, 64: 5}

# What makes a router for a layer and a number of heads to keep; give `rows` another one to time it.
MakeRouter = Callable[[Anatomy, int, int], Choose]


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds are medians of alternated calls."""

    model: str
    part: str  # "sublayer" or "model"
    batch: int
    keep: int
    dense: float
    routed: float  # with its router
    router: float  # alone
    kl: float
    fidelity: float


def standin(body: Anatomy, layer: int, keep: int) -> Choose:
    """A router of the usual size, on [first token; mean; variance] of the residual, that draws its heads at random.

    What it says is only the start of the draw, so that the heads differ from input to input.
    """
    heads, width = body.layers[layer].units, body.layers[layer].units * body.layers[layer].width
    encoder = nn.Sequential(nn.LayerNorm(3 * width), nn.Linear(3 * width, 256), nn.GELU(), nn.Linear(256, 256))
    network = nn.Sequential(encoder, nn.GELU(), nn.Linear(256, heads))
    generator = torch.Generator().manual_seed(layer)

    def summary(x: Tensor) -> Tensor:
        # One input at a time stays in the cache, and products sum fast: a tenth of the time of torch.var_mean over all.
        share = torch.full((len(x),), 1 / len(x))
        mean = share @ x
        return torch.cat([x[0], mean, share @ (x - mean).square_()])

    def choose(residual: Tensor) -> Tensor:
        scores = network(torch.stack([summary(x) for x in residual]))
        scores = scores + 100 * torch.rand(scores.shape, generator=generator)
        return scores.topk(keep).indices

    return choose


def rows(
    case: Case,
    *,
    batches: Sequence[int],
    keeps: Sequence[int],
    repeats: int | None = None,
    make: MakeRouter = standin,
    way: Way = "auto",
) -> Iterator[Row]:
    """The lines of one model."""
    # Two models, so that the routed one can stay as it is while both are timed in turn.
    dense, body = anatomy(copy.deepcopy(case.model)), anatomy(case.model)
    for size in batches:
        batch = {name: value[:size] for name, value in case.batch.items()}
        logits = dense.run(batch).logits
        times = repeats or REPEATS.get(size, 5)
        for keep in keeps:
            chosen = {layer: make(body, layer, keep) for layer in range(len(body.layers))}
            for part, timed, layers in (("sublayer", _sublayer, [len(body.layers) // 2]), ("model", _whole, [*chosen])):
                own = {layer: chosen[layer] for layer in layers}
                with compacted(body, own, way=way):
                    lost = _lost(logits, body.run(batch).logits)
                yield Row(case.name, part, size, keep, **timed(dense, body, batch, own, times, way), **lost)


def _sublayer(
    dense: Anatomy, body: Anatomy, batch: Batch, chosen: Mapping[int, Choose], repeats: int, way: Way
) -> dict[str, float]:
    """Norm and attention of one layer, on its own input."""
    (layer, choose), *_ = chosen.items()
    residual = capture(dense, batch, [layer]).sites[layer].residual
    norm = next(getattr(body.layers[layer].block, name) for name in NORMS if hasattr(body.layers[layer].block, name))
    attention, part = dense.layers[layer].attention, compact(body, layer, way=way)
    return _timed(
        {
            "dense": lambda: attention(norm(residual)),
            "routed": lambda: part.run(norm(residual), choose(residual)),
            "router": lambda: choose(residual),
        },
        repeats,
    )


def _whole(
    dense: Anatomy, body: Anatomy, batch: Batch, chosen: Mapping[int, Choose], repeats: int, way: Way
) -> dict[str, float]:
    """The whole model."""
    residuals = {layer: site.residual for layer, site in capture(dense, batch, chosen).sites.items()}
    with compacted(body, chosen, way=way):
        return _timed(
            {
                "dense": lambda: dense.run(batch),
                "routed": lambda: body.run(batch),
                "router": lambda: [choose(residuals[layer]) for layer, choose in chosen.items()],
            },
            max(3, repeats // 3),
        )


def error(case: Case, keep: int, inputs: int = 4) -> float:
    """The largest difference of the logits to gates of zero, all layers routed, over the largest logit."""
    body = anatomy(case.model)
    batch = {name: value[:inputs] for name, value in case.batch.items()}
    chosen = {layer: standin(body, layer, keep) for layer in range(len(body.layers))}
    kept: dict[int, Tensor] = {}

    def remember(layer: int) -> Choose:
        def choose(residual: Tensor) -> Tensor:
            return kept.setdefault(layer, chosen[layer](residual))

        return choose

    def gate(layer: int) -> Callable[..., tuple[Tensor]]:
        own = body.layers[layer]

        def hook(_site: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            gates = torch.zeros(inputs, own.units).scatter_(1, kept[layer], 1.0)
            return (args[0] * spread(gates, own)[:, None],)

        return hook

    with compacted(body, {layer: remember(layer) for layer in chosen}):
        found = body.run(batch).logits
    with hooked(body.layers[layer].site.register_forward_pre_hook(gate(layer)) for layer in chosen):
        truth = body.run(batch).logits
    return float((found - truth).abs().max() / truth.abs().max())


def _timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for call in calls.values():
        call()
    return median_seconds_in_turn(calls, repeats)


def _lost(dense: Tensor, logits: Tensor) -> dict[str, float]:
    """Mean KL to the dense model, and the share of distributions whose most likely class is the dense model's."""
    same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(dense, logits, strict=True)])
    each = torch.cat([kl(a, probabilities(a), b).flatten() for a, b in zip(dense, logits, strict=True)])
    return {"kl": float(each.mean()), "fidelity": float(same.double().mean())}


def markdown(found: Sequence[Row], heads: int) -> str:
    """A table for each model."""
    head = ("part", "batch", f"K of {heads}", "dense ms", "routed ms", "router ms in it", "of dense", "faster", "KL")
    blocks = []
    for model in dict.fromkeys(row.model for row in found):
        lines = [(*head, "fidelity"), ("---",) * (len(head) + 1)]
        lines += [_line(row) for row in found if row.model == model]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        blocks.append(f"### {TITLES.get(model, model)}\n\n{table}")
    return "\n\n".join(blocks)


def _line(row: Row) -> tuple[str, ...]:
    ratio = row.routed / row.dense
    seconds = (f"{1e3 * value:.1f}" for value in (row.dense, row.routed, row.router))
    verdict = "yes" if ratio < 1 else "**no**"
    return (
        *(row.part, str(row.batch), str(row.keep), *seconds),
        *(f"{ratio:.2f}", verdict, f"{row.kl:.3g}", f"{row.fidelity:.1%}"),
    )


def main() -> None:
    """Print a table for each model, and the difference to gates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="K = 3 at batches of 1 and 8, few repetitions")
    parser.add_argument("--tiny", action="store_true", help="miniatures, to see that everything runs")
    parser.add_argument("--model", choices=TITLES, action="append")
    parser.add_argument("--batch", type=int, action="append", help="1, 8 and 64 by default")
    parser.add_argument("--keep", type=int, action="append", help="3, 6 and 9 by default")
    parser.add_argument("--way", choices=("auto", "heads", "gathered"), default="auto")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    batches = options.batch or ([1, 8] if options.quick or options.tiny else [1, 8, 64])
    keeps = options.keep or ([1, 2] if options.tiny else [3] if options.quick else [3, 6, 9])
    repeats = options.repeats or (5 if options.quick or options.tiny else None)
    found: list[Row] = []
    with torch.no_grad():
        errors = []
        for name in options.model or TITLES:
            case = CASES[name](tiny=options.tiny, inputs=max(*batches, 4))
            errors.append(f"{max(error(case, keep) for keep in keeps):.0e} ({name})")
            for row in rows(case, batches=batches, keeps=keeps, repeats=repeats, way=options.way):
                found.append(row)
                print(*(getattr(row, field.name) for field in fields(row)), file=sys.stderr)
    named = ", ".join(f"{key} {value}" for key, value in machine().items())
    page = (
        f"{markdown(found, case.heads)}\n\nAll layers routed, the logits differ from those under gates of zero by at "
        f"most {', '.join(errors)} of the largest. Weights and heads kept are random: KL and fidelity belong to these, "
        f"not to a trained router.\n\n*{named}.*\n"
    )
    print(page)
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
