"""The frame of a study: what it needs, how it runs, what the paper says, and what was found."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd
import xarray as xr
from torch import nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.meter import Progress

Scale = Literal["mini", "paper"]


@dataclass(frozen=True)
class Setting:
    """What a study runs on."""

    scale: str
    model: nn.Module
    inputs: Callable[[int], Inputs]  # so many of them
    own: bool = False  # the user's own model or inputs: other counts than the paper's
    progress: Callable[[str], Progress] | None = None  # a bar for a step, by its name

    def bar(self, step: str) -> Progress | None:
        """The progress callback of a step."""
        return None if self.progress is None else self.progress(step)


@dataclass(frozen=True)
class Finding:
    """A claim of the paper that can hold or fail elsewhere: an ordering or a sign, no absolute number."""

    claim: str
    holds: bool | None  # None: it cannot be said here
    figures: str

    @classmethod
    def of(cls, claim: str, figures: str, *orders: tuple[float, float]) -> Finding:
        """Holds if the first of each pair is above the second; cannot be said of what is equal or no number."""
        if any(a < b for a, b in orders):
            return cls(claim, False, figures)
        return cls(claim, True if all(a > b for a, b in orders) else None, figures)


@dataclass(frozen=True)
class Report:
    """What a study found: tables with our figures beside the paper's, and its findings."""

    tables: Mapping[str, pd.DataFrame]
    findings: tuple[Finding, ...]
    data: Mapping[str, xr.Dataset]  # what was measured; its attributes say how
    about: Mapping[str, object] = field(default_factory=dict)

    def save(self, folder: Path) -> list[Path]:
        """Write the tables as CSV, what was measured as Zarr, and the findings with the protocol as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, table in self.tables.items():
            written.append(folder / f"{name}.csv")
            table.to_csv(written[-1])
        for name, dataset in self.data.items():
            written.append(folder / f"{name}.zarr")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # zarr's notes on strings, as in `run`
                dataset.drop_encoding().to_zarr(written[-1], mode="w", zarr_format=3)
        written.append(folder / "findings.json")
        found = [{"claim": f.claim, "holds": f.holds, "figures": f.figures} for f in self.findings]
        written[-1].write_text(json.dumps({**self.about, "findings": found}, indent=1) + "\n", encoding="utf-8")
        return written


@dataclass(frozen=True)
class Study:
    """One of the paper's studies.

    models: the model of each scale, by the name that `load` takes. needs: what a scale takes, in words. run: does it.
    """

    name: str
    title: str
    models: Mapping[str, str]
    needs: Mapping[str, str]
    run: Callable[[Setting], Report]

    def model(self, scale: str) -> str:
        """The model of a scale."""
        if scale not in self.models:
            raise UnderstudyError(f"--scale {scale} is not possible: {self.name} has {' and '.join(self.models)}.")
        return self.models[scale]


def beside(ours: pd.Series, paper: Mapping[str, float]) -> pd.Series:
    """The paper's figures in the order of ours."""
    return pd.Series([paper.get(str(name), float("nan")) for name in ours.index], index=ours.index)


def put_after(table: pd.DataFrame, column: str, name: str, values: pd.Series) -> None:
    """Insert a column behind another one."""
    table.insert(list(table.columns).index(column) + 1, name, values)
