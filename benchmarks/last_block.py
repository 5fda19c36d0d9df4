"""Seconds for each input against one full forward for each intervention: last block of a ViT-B-sized model, grid:31.

Both sides run the same interventions: H drops, and 30 values of alpha for each of the H(H-1) pairs (alpha = 1 is the
drop). The full forward is timed at its best batch size; ours includes the capture and everything else that `measure`
does. Weights are random, which changes no cost; every source is made valid, so that nothing is skipped.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import ViTConfig, ViTForImageClassification

import understudy as us


def seconds(call, repeats):
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
    pixels = torch.randn(options.inputs, 3, 224, 224)
    heads = model.config.num_attention_heads
    interventions = heads + heads * (heads - 1) * 30

    def forward(size):
        with torch.no_grad():
            model(pixels[:1].expand(size, -1, -1, -1))

    full = {}
    for size in (1, 2, 4, 8, 16):
        forward(size)
        full[size] = seconds(lambda size=size: forward(size), options.repeats) / size
    best = min(full, key=full.get)
    print("one full forward, seconds for each row:", {size: round(value, 4) for size, value in full.items()})

    def measure():
        return us.measure(model, {"pixel_values": pixels}, layers="last", search="grid:31", threshold=1e-300)

    run = measure()
    assert run["substitutability"].notnull().sum() == options.inputs * heads * (heads - 1)
    ours = seconds(measure, options.repeats) / options.inputs
    plain = full[best] * interventions
    print(f"interventions for each input: {interventions:,}")
    print(f"full forwards, batches of {best}: {plain:,.0f} s for each input ({full[best]:.4f} s each)")
    print(f"understudy, capture included: {ours:.3f} s for each input")
    print(f"ratio: {plain / ours:,.0f}")


if __name__ == "__main__":
    main()
