"""understudy on the cases of the peers: seconds for a matrix, the limit that arithmetic sets, and the bare suffix.

python -m benchmarks.ours --case vit
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from benchmarks.bare import remaining
from benchmarks.cases import CASES, Case
from benchmarks.suffix import suffix_of
from benchmarks.timing import best_rows, median_seconds_in_turn
from benchmarks.versus import Row, interventions
from torch import Tensor

import understudy as us
from understudy.anatomy import anatomy
from understudy.costs import Shape

RATE = (1024, 768, 3072)  # the product whose rate is the limit: rows, width and inner width of a block


@dataclass(frozen=True)
class Limits:
    """How near a case comes to what its arithmetic allows, seconds for each row."""

    case: str
    matmul_rate: float  # floating-point operations a second, measured in turn with the rest
    flops_row: float
    share_of_rate: float  # of the limit in our time, grid:31
    resumed: float  # rows resumed, without the divergence
    bare: float | None  # the remaining layers and the head, plainly, at their best number of rows
    head: float | None
    divergence: float


def rows(case: Case, *, inputs: int, repeats: int) -> tuple[list[Row], Limits]:
    """Our rows of the table and the limits, timed in turn."""
    heads, count = case.heads, interventions(case.heads)
    a, b = torch.randn(RATE[:2]), torch.randn(RATE[1:])
    product = a @ b

    def measured(search: str) -> Callable[[], object]:
        return lambda: us.measure(
            case.model, case.batch, layers=case.layer, outcome=case.outcome, search=search, threshold=1e-300
        )

    with suffix_of(case.model, case.batch, case.layer, case.outcome) as (suffix, read):
        shape = Shape.of(
            anatomy(case.model),
            tokens=suffix.taken.tokens,
            distributions=read.counts[0],
            read=read.counts[0] * read.tokens.shape[1],
            classes=suffix.classes,
        )
        sampled = len(case.batch[next(iter(case.batch))]) * count if suffix.at_end else 24
        gates = torch.rand(sampled, heads)
        owner = torch.arange(suffix.taken.count).repeat_interleave(-(-sampled // suffix.taken.count))[:sampled]
        calls: dict[str, Callable[[], object]] = {
            "matmul": lambda: torch.mm(a, b, out=product),
            "rows": lambda: suffix.resume(gates, owner),
            "resumed": lambda: suffix.resume(gates, owner, reduce=_first_logit),
        }
        if not suffix.at_end:
            blocks, head = remaining(case)
            hidden = suffix.residual[:1].expand(sampled, -1, -1).clone()
            size = best_rows(lambda size: blocks(hidden[:size]), (1, 2, 4, 8, 16))
            states = blocks(hidden[:size])
            calls["blocks"] = lambda: [blocks(part) for part in hidden.split(size)]
            calls["head"] = lambda: head(states)
        for call in calls.values():
            call()
        timed = median_seconds_in_turn(calls, repeats)
    rate = 2 * RATE[0] * RATE[1] * RATE[2] / timed["matmul"]
    each = timed["rows"] / sampled
    bare_head = timed["head"] / size if "head" in timed else None

    searches = ["refine", "estimate"]
    exact = inputs * (shape.dense().flops + (count + 2) * shape.row(case.layer).flops)
    if suffix.at_end:  # short enough to be run whole
        searches.insert(0, "grid:31")
    for name in searches[-1:]:
        measured(name)()  # warmed up
    whole = median_seconds_in_turn({name: measured(name) for name in searches}, 1 if len(searches) == 2 else repeats)
    tool, version = "understudy", us.__version__
    table = []
    if "grid:31" not in whole:
        whole["grid:31"] = inputs * (count + 2) * each + shape.dense().flops * inputs / rate
    for name in ("grid:31", "refine", "estimate"):
        seconds = whole[name] / inputs
        note = "capture included" if name in searches else "rows timed and scaled to the matrix"
        # Only a grid runs every intervention of the matrix.
        each_of_grid = seconds / count if name == "grid:31" else None
        timed_rows = (inputs * count if name in searches else sampled) if name == "grid:31" else 0
        table.append(Row(case.name, tool, version, name, None, each_of_grid, seconds, timed_rows, None, note))
    limit = exact / inputs / rate
    table.append(
        Row(case.name, "limit", "", "grid:31", None, limit / count, limit, 0, None, "the work at the matmul rate")
    )
    limits = Limits(
        case=case.name,
        matmul_rate=rate,
        flops_row=shape.row(case.layer).flops,
        share_of_rate=limit / (whole["grid:31"] / inputs),
        resumed=timed["resumed"] / sampled,
        bare=timed["blocks"] / sampled + bare_head if bare_head is not None else None,
        head=bare_head,
        divergence=max(0.0, timed["rows"] - timed["resumed"]) / sampled,
    )
    return table, limits


def _first_logit(logits: Tensor, _dense: Tensor, _p: Tensor) -> Tensor:
    return logits[..., 0].double()


def main() -> None:
    """Print our rows and the limits, as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("understudy").setLevel(logging.ERROR)
    for name in CASES if options.case == "all" else [options.case]:
        inputs = 16 if name == "vit" else 1
        table, limits = rows(CASES[name](tiny=options.tiny, inputs=inputs), inputs=inputs, repeats=options.repeats)
        for row in table:
            print(json.dumps(asdict(row)), flush=True)
        print(json.dumps(asdict(limits)), flush=True)


if __name__ == "__main__":
    main()
