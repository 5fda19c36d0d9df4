"""How far a conventional measure ranks the candidates of a source as CFS does. Pure."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr
from scipy.stats import rankdata

from understudy.organize.aggregate import with_all
from understudy.organize.bootstrap import interval, value
from understudy.organize.organization import measured, substitutability
from understudy.organize.pooled import Array, Statistic, pooled_mean

# In the order of the paper's table.
PROXIES = ("taylor", "attention", "cosine", "proximity", "parameters", "norm")


def proxies(
    run: xr.Dataset, signals: xr.Dataset, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Return the mean within-source Spearman correlation of each proxy with S: the paper's Table 1(b).

    A ranking is one source of one input at one layer: its candidates by S, and by the proxy. Where either is constant
    there is no ranking; such rows are left out and counted in `constant`. Means are over a layer's rankings, then over
    layers; intervals resample inputs.
    """
    substitutability(run)
    (run,) = measured(run)
    signals = signals.sel(input=run["input"], layer=run["layer"])
    S = run["substitutability"].transpose("input", "layer", "source", "substitute").values
    rows = {}
    for name in PROXIES:
        scores = _scores(signals[name], S.shape)
        found = within_source(S, scores)
        mean = pooled_mean([found[:, layer] for layer in range(S.shape[1])])

        def statistic(draws: Array, mean: Statistic = mean) -> Array:
            return np.asarray(with_all(mean(draws))[-1])

        low, high = interval(statistic, len(S), confidence=confidence, resamples=resamples, seed=seed)
        valid = (np.isfinite(S) & np.isfinite(scores)).any(-1)
        rows[name] = {
            "spearman": float(value(statistic, len(S))),
            "spearman_low": float(low),
            "spearman_high": float(high),
            "rankings": int(np.isfinite(found).sum()),
            "constant": int((valid & ~np.isfinite(found)).sum()),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("proxy")


def within_source(S: Array, scores: Array) -> Array:
    """The rank correlation of the last axes where both are numbers: NaN where one is constant, or too few are.

    >>> S = np.array([[np.nan, 0.1, 0.2, 0.3], [0.3, np.nan, 0.2, 0.1]])
    >>> within_source(S, np.array([[0, 1, 2, 3], [0, 1, 2, 3]])).round(3)
    array([ 1., -1.])
    """
    known = np.isfinite(S) & np.isfinite(scores)
    a, b = (_centred_ranks(np.where(known, values, np.nan)) for values in (S, scores))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.where(known.sum(-1) > 1, found, np.nan)


def _centred_ranks(values: Array) -> Array:
    """Ranks along the last axis, ties at their mean, less their mean; 0 where there is no number."""
    ranks = rankdata(values, axis=-1, nan_policy="omit")
    known = np.isfinite(values)
    count = known.sum(-1, keepdims=True)
    return np.where(known, ranks - (count + 1) / 2, 0.0)


def _scores(signal: xr.DataArray, shape: tuple[int, ...]) -> Array:
    """A proxy as one score for each candidate of each source."""
    values = signal.values
    if "input" not in signal.dims:
        values = values[None]
    if "source" not in signal.dims:
        values = values[:, :, None]
    return np.broadcast_to(values, shape).astype(np.float64)
