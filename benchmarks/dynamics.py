"""What measuring during a training costs: the mini run of figure2, with and without a probe.

python -m benchmarks.dynamics

Trains the digits recipe with a probe of 64 held-out digits at three layers (`estimate`, 23 measurements, runs written),
and without one. The time inside the probe and the rest come from one run, so that a machine that is faster in one
minute than in the next does not matter; the run without it shows that the weights are the same.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import understudy as us
from understudy.recipes.digits import DIGITS
from understudy.recipes.kept import kept
from understudy.scaling.probe import Probe

EVENTS = ("on_train_begin", "on_step_end", "on_epoch_end", "on_save", "on_train_end")


class Timed(Probe):
    """A probe that knows how long it took."""

    seconds = 0.0


def _timed(name: str) -> Any:
    def event(self: Timed, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        getattr(Probe, name)(self, *args, **kwargs)
        self.seconds += time.perf_counter() - begun

    return event


for _name in EVENTS:
    setattr(Timed, _name, _timed(_name))


def main() -> None:
    """Train twice, and print the share."""
    epochs = sorted({0, 1, 2, 3, *(round(DIGITS.epochs * share / 20) for share in range(1, 21))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probe = Timed(us.digits(64), at=epochs, unit="epochs", layers="quarters", out=folder / "probe")
        begun = time.perf_counter()
        watched = kept(DIGITS, folder / "watched", seed=0, callbacks=[probe])
        whole = time.perf_counter() - begun
        begun = time.perf_counter()
        plain = kept(DIGITS, folder / "plain", seed=0)
        alone = time.perf_counter() - begun
        a, b = (load_file(out / "model.safetensors") for out in (watched, plain))
        same = all(torch.equal(a[key], b[key]) for key in a)
    rest = whole - probe.seconds
    print(f"{len(probe.runs)} measurements of 64 inputs at {len(probe.runs[0]['layer'])} layers, estimate")
    print(f"training {rest:.1f} s, probe {probe.seconds:.1f} s: {probe.seconds / rest:+.1%}")
    print(f"without a probe {alone:.1f} s; the same weights: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
