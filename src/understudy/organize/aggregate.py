"""From inputs to layers: the rules by which the numbers of a run are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from understudy.organize.direction import gap, mean_known, one_sided
from understudy.organize.organization import LEVELS, each_layer, only_complete, organization, substitutability
from understudy.organize.pooled import Array, Ranked, Statistic, pooled_mean, pooled_quantile


@dataclass(frozen=True)
class Aggregate:
    """The statistics of a run by column name, each a function of how often an input is drawn.

    `counts` are what was left out, for each layer: sources without S (`invalid`), sources with candidates that
    were not run (`partial`), inputs without any valid source (`empty`). `same` names the columns of coverage
    that exempts invalid sources, `*_exempt`, that say nothing new: they equal the other reading everywhere.
    """

    layers: tuple[int, ...]
    inputs: int
    units: int
    statistics: dict[str, Statistic]
    counts: pd.DataFrame
    same: frozenset[str]


def aggregate(run: xr.Dataset, *, matched: int, taus: float | Sequence[float], direction: bool = True) -> Aggregate:
    """Return the statistics of a run.

    Raw and Matched are means over a layer's valid source-input pairs, coverage and rank over inputs; the gaps and
    one-sided relations are pooled over a layer's pairs of units. Inputs are taken in the order of their ids, so that
    a resample with a given seed draws the same ones however the run is ordered.
    """
    found = organization(run, matched=matched, taus=taus)
    order = np.argsort(np.array([str(name) for name in found["input"].to_numpy()]), kind="stable")
    found = found.isel(input=order)

    def mean(of: xr.DataArray) -> Statistic:
        return pooled_mean([of.isel(layer=index).to_numpy() for index in range(of.sizes["layer"])])

    statistics = {"raw": mean(found["raw"]), f"matched{matched}": mean(found["matched"])}
    same = set()
    for tau in found["tau"].to_numpy():
        name = f"cover{100 * tau:g}"
        retained, exempt = found["coverage"].sel(tau=tau), found["coverage_exempt"].sel(tau=tau)
        statistics[name] = mean(retained)
        statistics[f"{name}_exempt"] = mean(exempt)
        if retained.equals(exempt):
            same.add(f"{name}_exempt")
    statistics["rank"] = mean(found["rank_fraction"])
    if direction:
        zero = float(run.attrs.get("zero", 0.0))
        gaps: list[Ranked] = []
        sides: dict[str, list[Array]] = {name: [] for name in LEVELS}
        for S in each_layer(substitutability(run)):
            known = only_complete(S)[order]
            gaps.append(Ranked(gap(known)))
            for name, level in LEVELS.items():
                sides[name].append(one_sided(known, level, zero))
        statistics |= {"gap_median": pooled_quantile(gaps, 0.5), "gap_upper": pooled_quantile(gaps, 0.75)}
        statistics |= {name: pooled_mean(shares) for name, shares in sides.items()}
    units = run.sizes["source"]
    counts = pd.DataFrame(
        {
            "invalid": found["invalid"].sum("input").to_numpy(),
            "partial": found["partial"].sum("input").to_numpy(),
            "empty": (found["invalid"] == units).sum("input").to_numpy(),
        }
    )
    layers = tuple(int(layer) for layer in found["layer"].to_numpy())
    return Aggregate(layers, len(order), units, statistics, counts, frozenset(same))


def with_all(values: Array) -> Array:
    """Return `[layers, ...]` with one more row: the equal-weight mean of the layers that can be said.

    >>> with_all(np.array([[1.0], [4.0], [np.nan]]))[:, 0]
    array([1. , 4. , nan, 2.5])
    """
    return np.concatenate([values, mean_known(np.moveaxis(values, 0, -1))[None]])


def rows(layers: Sequence[int]) -> pd.Index[Any]:
    """Return the index of a table: the layers and "all"."""
    return pd.Index([*layers, "all"], dtype=object, name="layer")
