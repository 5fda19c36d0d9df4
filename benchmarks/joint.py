"""The joint-subset oracle of a ViT-B-sized model's last layer, against the bare time of its matrix products.

python -m benchmarks.joint
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from benchmarks.cases import vit
from benchmarks.suffix import suffix_of
from benchmarks.timing import median_seconds_in_turn

from understudy.lens.joint import joint
from understudy.lens.subsets import count_subsets, subsets

KEEP = (3, 6, 9)


def main() -> None:
    """Print both times for each input, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    case = vit(inputs=options.inputs)
    rows = sum(count_subsets(case.heads, keep) for keep in KEEP)
    config = case.model.config
    width, inner, classes = config.hidden_size, config.intermediate_size, config.num_labels
    with suffix_of(case.model, case.batch, case.layer, case.outcome) as (suffix, _):
        # For each input: contributions mixed by gates, the block's MLP and the head, one class token a row.
        gates, parts = torch.rand(rows, case.heads), torch.randn(case.heads, width)
        hidden = torch.randn(rows, width)
        up, down, head = torch.randn(width, inner), torch.randn(inner, width), torch.randn(width, classes)

        def products() -> None:
            for _ in range(options.inputs):
                gates @ parts
                hidden @ up @ down
                hidden @ head

        masks = np.concatenate([part for keep in KEEP for part in subsets(case.heads, keep)])
        every = torch.from_numpy(np.tile(masks, (options.inputs, 1))).float()
        owner = torch.arange(options.inputs).repeat_interleave(rows)

        def resumed() -> None:
            suffix.resume(every, owner)

        def oracle() -> None:
            joint(case.model, case.batch, keep=KEEP, layer=case.layer)

        def dense() -> None:
            with torch.no_grad():
                case.model(**case.batch)

        calls = {"oracle": oracle, "rows": resumed, "products": products, "dense": dense}
        for call in calls.values():
            call()
        timed = median_seconds_in_turn(calls, options.repeats)
    each = {name: seconds / options.inputs for name, seconds in timed.items()}
    print(f"{rows:,} subsets of the last layer, for each of {options.inputs} inputs:")
    print(f"oracle, with its dense forward     {each['oracle']:.3f} s")
    print(f"its rows alone, with divergence    {each['rows']:.3f} s, {each['rows'] / each['products']:.2f} of products")
    print(f"bare matrix products of the rows   {each['products']:.3f} s")
    print(f"dense forward alone                {each['dense']:.3f} s")
    print(
        f"ratio of the oracle to products and dense forward: {each['oracle'] / (each['products'] + each['dense']):.2f}"
    )


if __name__ == "__main__":
    main()
