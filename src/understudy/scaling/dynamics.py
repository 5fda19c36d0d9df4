"""Training dynamics: a recipe trained under a probe, unless that is done."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xarray as xr

from understudy.inputs.batch import Inputs
from understudy.recipes.kept import Trainable, kept, place
from understudy.recipes.recipe import Progress
from understudy.scaling.probe import Probe, runs_in
from understudy.scaling.trajectory import trajectory
from understudy.worker import Layers


@dataclass(frozen=True)
class Watched:
    """A recipe and a seed, and how its training is looked at."""

    recipe: Trainable
    seed: int
    inputs: Inputs
    epochs: Sequence[int]  # after which it is measured, and at the end
    layers: Layers
    search: str
    scored: Inputs  # of the task metric

    @property
    def name(self) -> str:
        """The folder name: another look at the same training has another one."""
        look = [self.inputs.fingerprint(), list(self.epochs), self.layers, self.search, self.scored.fingerprint()]
        return f"{place(self.recipe, self.seed)}-watched-{hashlib.sha256(repr(look).encode()).hexdigest()[:8]}"

    def trajectory(self, folder: Path, progress: Progress | None = None) -> xr.Dataset:
        """How its organization formed; model and runs are kept below `folder`."""
        runs = folder / self.name / "probe"
        probe = Probe(
            self.inputs,
            at=self.epochs,
            unit="epochs",
            layers=self.layers,
            search=self.search,
            scored=self.scored,
            out=runs,
        )
        kept(self.recipe, folder / self.name, seed=self.seed, progress=progress, callbacks=[probe])
        return trajectory(list(runs_in(runs).values())).assign_attrs(model=self.recipe.name)
