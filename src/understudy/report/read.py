"""What the figures read from a trajectory: training time, layers, warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from understudy.errors import UnderstudyError

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Time:
    """The x axis of a trajectory: its name, the place of each step, and the edges halfway between steps."""

    name: str
    steps: NDArray[np.int64]
    values: Floats
    edges: Floats

    @property
    def span(self) -> list[float]:
        """The range of the axis."""
        return [float(self.edges[0]), float(self.edges[-1])]

    def label(self, index: int) -> str:
        """Return the words for one step, e.g. "epoch 25"."""
        return f"step {self.steps[index]}" if self.name == "step" else f"epoch {round(float(self.values[index]), 2):g}"

    def labels(self) -> list[str]:
        """Return for each step what a hover text says of it."""
        if self.name == "step":
            return [self.label(index) for index in range(len(self.steps))]
        return [f"{self.label(index)} (step {step})" for index, step in enumerate(self.steps)]


def need(trajectory: xr.Dataset, *names: str) -> None:
    """Refuse a dataset that lacks one of the variables."""
    lacks = [name for name in names if name not in trajectory]
    if lacks:
        raise UnderstudyError(
            f"This figure draws {', '.join(names)} of a trajectory, but the dataset has no {', '.join(lacks)}: "
            f"it holds {', '.join(map(str, trajectory.data_vars)) or 'nothing'}."
        )


def training_time(trajectory: xr.Dataset) -> Time:
    """Return the time axis: epochs where the trajectory knows them all, else steps."""
    need(trajectory, "step")
    steps = trajectory["step"].to_numpy()
    name, values = "step", steps.astype(np.float64)
    if "epoch" in trajectory and np.isfinite(trajectory["epoch"].to_numpy().astype(np.float64)).all():
        name, values = "epoch", trajectory["epoch"].to_numpy().astype(np.float64)
    return Time(name, steps, values, edges(values))


def edges(values: Floats) -> Floats:
    """Return the `n + 1` ends of the cells around `n` places.

    >>> edges(np.array([0.0, 10.0, 100.0]))
    array([ -4.,   5.,  55., 104.])

    The outer cells end where they would by symmetry, but after 4% of the span, so that no axis is half empty, and
    not before 1.2%, so that no marker is cut.
    """
    if len(values) < 2:
        return np.array([values[0] - 0.5, values[0] + 0.5])
    middle = (values[1:] + values[:-1]) / 2
    span = values[-1] - values[0]
    first, last = np.clip([middle[0] - values[0], values[-1] - middle[-1]], 0.012 * span, 0.04 * span)
    return np.concatenate([[values[0] - first], middle, [values[-1] + last]])


def layer_names(trajectory: xr.Dataset) -> list[str]:
    """Return "layer 3" and so on."""
    return [f"layer {layer}" for layer in trajectory["layer"].to_numpy()]


def unit(trajectory: xr.Dataset) -> str:
    """Return what one source is called."""
    return "head" if trajectory.attrs.get("units", "heads") == "heads" else "unit"


def warmup(trajectory: xr.Dataset) -> Bools:
    """Return where sources are barely valid: `[step, layer]`, nowhere if the trajectory does not say."""
    if "warmup" not in trajectory:
        return np.zeros((trajectory.sizes["step"], trajectory.sizes["layer"]), dtype=np.bool_)
    found: Bools = trajectory["warmup"].transpose("step", "layer").to_numpy().astype(np.bool_)
    return found


def runs(marked: Bools) -> list[tuple[int, int]]:
    """Return the stretches of true values, each as its first index and the one after its last.

    >>> runs(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    turns = np.flatnonzero(np.diff(np.concatenate([[False], marked, [False]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in turns.reshape(-1, 2)]
