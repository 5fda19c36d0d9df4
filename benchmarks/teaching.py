"""What teaching a router takes at ViT-B size: seconds of the teacher for an input, and of the fit for an epoch.

    python -m benchmarks.teaching [--inputs 8] [--tiny]

Random weights; the last layer; budgets of a quarter, a half and three quarters. Prints a Markdown table for 4,096
inputs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from benchmarks.cases import CASES
from benchmarks.timing import machine

from understudy.inputs.batch import Inputs
from understudy.lens.subsets import default_budgets
from understudy.routing.fit import Settings, fit
from understudy.routing.lesson import joint_masks, lesson
from understudy.routing.network import RouterNetwork

PAPER = 4096  # inputs
MASKS = 48


def _seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    found = call()
    return found, time.perf_counter() - started


def main() -> None:
    """Measure on a few inputs and price the paper's number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a miniature, to see that everything runs")
    options = parser.parse_args()
    case = CASES["vit"](tiny=options.tiny, inputs=options.inputs)
    inputs = Inputs.of({name: value[: options.inputs] for name, value in case.batch.items()})
    keep = default_budgets(case.heads)
    lesson(case.model, inputs.take([0]))  # warm
    taught, pairs = _seconds(lambda: lesson(case.model, inputs))
    network = RouterNetwork(taught.z.shape[1], taught.units).eval()
    with torch.no_grad():
        said = network(taught.z)
    masks, subsets = _seconds(lambda: joint_masks(case.model, inputs, taught, keep=keep, said=said, count=MASKS))
    many = -(-512 // len(taught))  # repeated, so that steps are full
    repeated = replace(
        taught,
        **{name: torch.cat([getattr(taught, name)] * many) for name in ("z", "S", "alpha", "weight", "stake")},
        masks={
            size: replace(each, retained=torch.cat([each.retained] * many), kl=torch.cat([each.kl] * many))
            for size, each in masks.items()
        },
    )
    one = Settings(epochs=1)
    fits = {}
    for stage, of in (("R1", replace(repeated, masks={})), ("R2", repeated)):
        _, seconds = _seconds(lambda of=of: fit(of, keep=keep, seed=0, settings=one))  # type: ignore[misc]
        fits[stage] = PAPER / len(repeated) * seconds * Settings().epochs
    rows = {
        "pairs (refine), Taylor, size, summaries": PAPER * pairs / len(inputs),
        f"{MASKS} subsets of each of {len(keep)} budgets": PAPER * subsets / len(inputs),
        f"fit of R1, {Settings().epochs} epochs": fits["R1"],
        f"fit of R2, {Settings().epochs} epochs": fits["R2"],
    }
    print(f"| at {PAPER:,} inputs, one seed | seconds |\n|---|---|")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:,.0f} |")
    print(f"| all | {sum(rows.values()):,.0f} |")
    print(f"\n*Measured on {len(inputs)} inputs. {', '.join(f'{key} {value}' for key, value in machine().items())}.*")


if __name__ == "__main__":
    main()
