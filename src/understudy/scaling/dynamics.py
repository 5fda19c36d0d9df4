"""Training dynamics: a recipe trained under a probe, unless that is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xarray as xr

from understudy.inputs.batch import Inputs
from understudy.recipes.kept import Trainable, kept, place
from understudy.recipes.recipe import Progress
from understudy.scaling.probe import Probe, runs_in
from understudy.scaling.trajectory import trajectory
from understudy.worker import Layers


def dynamics(
    recipe: Trainable,
    folder: Path,
    inputs: Inputs,
    *,
    epochs: Sequence[int],
    layers: Layers,
    search: str,
    scored: Inputs,
    seed: int,
    progress: Progress | None = None,
) -> xr.Dataset:
    """How a recipe's training went, on a probe set after these epochs and at the end; kept below `folder`."""
    runs = folder / place(recipe, seed) / "probe"
    probe = Probe(inputs, at=epochs, unit="epochs", layers=layers, search=search, scored=scored, out=runs)
    kept(recipe, folder, seed=seed, progress=progress, callbacks=[probe])
    return trajectory(list(runs_in(runs).values())).assign_attrs(model=recipe.name)
