"""A run in one table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from understudy.organize.aggregate import aggregate, rows, with_all
from understudy.organize.bootstrap import interval, value
from understudy.organize.organization import measured, substitutability, thresholds
from understudy.organize.pooled import Array
from understudy.store import NOISE_FACTOR

_NEAR = 1e-3


def summary(
    run: xr.Dataset,
    *,
    matched: int = 2,
    taus: float | Sequence[float] = (0.5,),
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the organization of each layer with intervals, and of "all" layers.

    >>> S = np.full((2, 1, 3, 3), 0.6)
    >>> dims = ("input", "layer", "source", "substitute")
    >>> run = xr.Dataset({"substitutability": (dims, S)}, {"input": ["a", "b"], "layer": [11]})
    >>> table = summary(run, taus=(0.5, 0.75))
    >>> table.loc[11, ["raw", "cover50", "cover75"]].astype(float).round(4).to_list()
    [0.6, 0.3333, 1.0]

    | column | |
    |---|---|
    | `raw`, `matched2` | Raw and Matched Oracle: mean over the layer's valid source-input pairs |
    | `cover50` | Cover/H at tau = 0.50: mean over inputs, invalid sources retained |
    | `cover50_exempt` | the same, invalid sources needing no cover; there if it differs anywhere |
    | `rank` | Rank/H: mean over inputs |
    | `gap_median`, `gap_upper` | median and 75th percentile of the directional gap over the layer's pairs |
    | `one_sided_10`, `one_sided_25` | share of the layer's pairs that are one-sided at 0.10, 0.25 |
    | `*_low`, `*_high` | the ends of the interval: inputs resampled with their values |
    | `valid` | share of source-input pairs that are valid |
    | `invalid`, `partial` | count of source-input pairs that are invalid; that have candidates which were not run |
    | `borderline` | count of source-input pairs within 0.1% of the threshold: how a run was cut may decide on them |
    | `inputs`, `empty` | count of measured inputs; of those without a valid source at the layer, which are in no mean |

    The row "all" is the equal-weight mean over layers, never pooled; its counts are sums over layers, save `inputs`.
    Means are over what can be said; the counts tell the rest. The order of inputs does not matter.

    Args:
        run: the result of a measurement.
        matched: the number m of candidates of the Matched Oracle.
        taus: one or several thresholds of coverage, each in (0, 1].
        confidence: the level of the intervals.
        resamples: how many times the inputs are drawn for them; 0 leaves the intervals NaN.
        seed: the same seed gives the same intervals.

    """
    substitutability(run)  # what is no run is refused
    (run,) = measured(run)
    found = aggregate(run, matched=matched, taus=taus)
    names = [name for name in found.statistics if name not in found.same]

    def statistic(draws: Array) -> Array:  # [columns, layers and all, resamples]
        return np.stack([with_all(found.statistics[name](draws)) for name in names])

    middle = value(statistic, found.inputs)
    low, high = interval(statistic, found.inputs, confidence=confidence, resamples=resamples, seed=seed)
    columns: dict[str, object] = {}
    for name, *ends in zip(names, middle, low, high, strict=True):
        columns |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    table = pd.DataFrame(columns, index=rows(found.layers))
    sums = np.vstack([found.counts, found.counts.sum()])
    per_row = found.inputs * found.units * np.array([1] * len(found.layers) + [len(found.layers)])
    table["valid"] = 1 - sums[:, 0] / per_row
    for name, count in zip(found.counts.columns, sums.T, strict=True):
        table[name] = count
    borderline = _borderline(run)
    table["borderline"] = [*borderline, sum(borderline)]
    table["inputs"] = found.inputs
    table.attrs = {str(key): attribute for key, attribute in run.attrs.items()}
    table.attrs |= {"matched": matched, "taus": list(thresholds(taus))}
    table.attrs |= {"confidence": confidence, "resamples": resamples, "bootstrap_seed": seed}
    return table


def _borderline(run: xr.Dataset) -> list[int]:
    """For each layer, the sources so near the threshold that rounding decides whether they are valid."""
    if "drop" not in run or "threshold" not in run.attrs:
        return [0] * run.sizes["layer"]
    limit = (
        np.maximum(run.attrs["threshold"], NOISE_FACTOR * run["noise"]) if "noise" in run else run.attrs["threshold"]
    )
    near = abs(run["drop"] / limit - 1) < _NEAR
    return [int(count) for count in near.sum(("input", "source")).values]
