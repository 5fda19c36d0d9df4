"""The frame of a study: what it needs, how it runs, what the paper says, and what was found."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pandas as pd
import xarray as xr
from torch import nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.meter import Progress
from understudy.report.export import can_export, save_all
from understudy.scaling.contrast import Contrast


@dataclass(frozen=True)
class Setting:
    """What a study runs on."""

    scale: str
    model: nn.Module
    inputs: Callable[[int], Inputs]  # so many of them
    own: bool = False  # the user's own model or inputs: other counts than the paper's
    progress: Callable[[str], Progress] | None = None  # a bar for a step, by its name
    count: int | None = None  # how many inputs were asked for, if not the study's own number
    folder: Path | None = None  # where a study that fits something keeps it, to go on from there

    def bar(self, step: str) -> Progress | None:
        """The progress callback of a step."""
        return None if self.progress is None else self.progress(step)


@dataclass(frozen=True)
class Finding:
    """A claim of the paper that can hold or fail elsewhere: an ordering or a sign, no absolute number."""

    claim: str
    holds: bool | None  # None: unresolved
    figures: str

    @classmethod
    def of(cls, claim: str, figures: str, *orders: tuple[float, float]) -> Finding:
        """Holds if the first of each pair is above the second; unresolved where they are equal or no numbers."""
        if any(a < b for a, b in orders):
            return cls(claim, False, figures)
        return cls(claim, True if all(a > b for a, b in orders) else None, figures)

    @classmethod
    def beyond_spread(cls, claim: str, contrasts: Mapping[str, Contrast]) -> Finding:
        """Holds if every contrast is above zero with its whole interval; inside the spread it is unresolved."""
        figures = "; ".join(f"{name} {contrast}" for name, contrast in contrasts.items())
        if any(contrast.high < 0 for contrast in contrasts.values()):
            return cls(claim, False, figures)
        return cls(claim, True if all(contrast.low > 0 for contrast in contrasts.values()) else None, figures)


@dataclass(frozen=True)
class Report:
    """What a study found: tables with our figures beside the paper's, and its findings."""

    tables: Mapping[str, pd.DataFrame]
    findings: tuple[Finding, ...]
    data: Mapping[str, xr.Dataset]  # what was measured; its attributes say how
    about: Mapping[str, object] = field(default_factory=dict)
    details: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # tables that are kept, not printed
    figures: Mapping[str, Any] = field(default_factory=dict)  # plotly's

    def save(self, folder: Path) -> list[Path]:
        """Write tables as CSV, what was measured as Zarr, the findings with the protocol as JSON, and figures.

        Figures are vector files (SVG and PDF) where kaleido and a browser are there to make them, else pages.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, table in {**self.tables, **self.details}.items():
            written.append(folder / f"{name}.csv")
            table.to_csv(written[-1])
        written.append(folder / "findings.json")
        found = [{"claim": f.claim, "holds": f.holds, "figures": f.figures} for f in self.findings]
        written[-1].write_text(json.dumps({**self.about, "findings": found}, indent=1) + "\n", encoding="utf-8")
        for name, dataset in self.data.items():
            written.append(folder / f"{name}.zarr")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # zarr's notes on strings, as in `run`
                dataset.drop_encoding().to_zarr(written[-1], mode="w", zarr_format=3)
        suffixes = ("svg", "pdf") if self.figures and can_export() else ("html",)
        drawn = {folder / f"{name}.{suffix}": figure for name, figure in self.figures.items() for suffix in suffixes}
        written += save_all(drawn)
        return written


class AnyStudy(Protocol):
    """What every study says of itself."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def title(self) -> str:
        """What it is, and where in the paper."""

    @property
    def needs(self) -> Mapping[str, str]:
        """What each scale takes, in words."""

    def takes(self, scale: str) -> tuple[str, ...]:
        """The options that it knows at a scale."""


@dataclass(frozen=True)
class Study:
    """One of the paper's studies of one model.

    models: the model of each scale, by the name that `load` takes. needs: what a scale takes, in words. run: does it.
    """

    name: str
    title: str
    models: Mapping[str, str]
    needs: Mapping[str, str]
    run: Callable[[Setting], Report]

    options: ClassVar[tuple[str, ...]] = (
        "model",
        "images",
        "labels",
        "texts",
        "masked_texts",
        "count",
        "length",
        "masks",
        "seed",
        "skip_bad",
        "head",
    )

    def takes(self, scale: str) -> tuple[str, ...]:  # noqa: ARG002
        """The options that it knows: the same at every scale."""
        return self.options


def checked(study: AnyStudy, scale: str, given: Mapping[str, object]) -> None:
    """Refuse a scale that a study has not, and options that say nothing to it, before anything is spent."""
    if scale not in study.needs:
        raise UnderstudyError(f"--scale {scale} is not possible: {study.name} has {' and '.join(study.needs)}.")
    takes = study.takes(scale)
    idle = [_option(name) for name, value in given.items() if value is not None and name not in takes]
    if idle:
        raise UnderstudyError(
            f"{', '.join(idle)} says nothing to {study.name} at scale {scale}: it takes "
            f"{', '.join(map(_option, takes))}."
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def beside(ours: pd.Series, paper: Mapping[str, float]) -> pd.Series:
    """The paper's figures in the order of ours."""
    return pd.Series([paper.get(str(name), float("nan")) for name in ours.index], index=ours.index)


def put_after(table: pd.DataFrame, column: str, name: str, values: pd.Series) -> None:
    """Insert a column behind another one."""
    table.insert(list(table.columns).index(column) + 1, name, values)
