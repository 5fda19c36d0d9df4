"""Two runs on the same inputs, compared pairwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from understudy.errors import UnderstudyError
from understudy.organize.aggregate import aggregate, rows, with_all
from understudy.organize.bootstrap import interval, value
from understudy.organize.organization import measured, substitutability, thresholds
from understudy.organize.pooled import Array

# What makes the numbers of two runs mean different things. The model and the search are what one compares.
PROTOCOL = ("units", "outcome", "threshold")


def compare(
    run_a: xr.Dataset,
    run_b: xr.Dataset,
    *,
    matched: int = 2,
    taus: float | Sequence[float] = (0.5,),
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the differences b minus a of each common layer and of "all" common layers, with paired intervals.

    >>> dims = ("input", "layer", "source", "substitute")
    >>> coords = {"input": ["x", "y"], "layer": [11]}
    >>> run_a = xr.Dataset({"substitutability": (dims, np.full((2, 1, 3, 3), 0.25))}, coords)
    >>> run_b = xr.Dataset({"substitutability": (dims, np.full((2, 1, 3, 3), 0.75))}, coords)
    >>> compare(run_a, run_b).loc[11, "raw_b_minus_a"]
    np.float64(0.5)

    For `raw`, `matched2`, `cover50` (and `cover50_exempt` where it differs) and `rank`, defined as in `summary`:
    `raw_a`, `raw_b`, `raw_b_minus_a`, and the ends `raw_b_minus_a_low`, `raw_b_minus_a_high`. Every resample
    draws the same inputs from both runs, so what makes an input easy or hard for both cancels. "all" is the
    equal-weight mean over the common layers that both runs can speak of. `inputs`, `invalid_a`, `invalid_b`,
    `partial_a` and `partial_b` count as in `summary`.

    Args:
        run_a: the run to compare with.
        run_b: the other run, with the same inputs in any order; its model and search may differ.
        matched: the number m of candidates of the Matched Oracle.
        taus: one or several thresholds of coverage, each in (0, 1].
        confidence: the level of the intervals.
        resamples: how many times the inputs are drawn for them; 0 leaves the intervals NaN.
        seed: the same seed gives the same intervals.

    """
    for run in (run_a, run_b):
        substitutability(run)  # so that what is no run is refused before its parts are compared
    _same_protocol(run_a, run_b)
    _same_inputs(run_a, run_b)
    layers = _common_layers(run_a, run_b)
    both = measured(run_a, run_b)
    a, b = (aggregate(run.sel(layer=layers), matched=matched, taus=taus, direction=False) for run in both)
    names = [name for name in a.statistics if name not in a.same & b.same]

    def statistic(draws: Array) -> Array:  # [a, b and b minus a; columns, layers and all, resamples]
        pair = np.stack([[run.statistics[name](draws) for name in names] for run in (a, b)])
        both = np.where(np.isnan(pair).any(axis=0), np.nan, pair)
        mean = np.stack([[with_all(values)[-1:] for values in run] for run in both])
        pair = np.concatenate([pair, mean], axis=2)
        return np.concatenate([pair, pair[1:] - pair[:1]])

    middle = value(statistic, a.inputs)
    low, high = interval(
        lambda draws: statistic(draws)[2], a.inputs, confidence=confidence, resamples=resamples, seed=seed
    )
    columns: dict[str, object] = {}
    for at, name in enumerate(names):
        columns |= {f"{name}_a": middle[0, at], f"{name}_b": middle[1, at], f"{name}_b_minus_a": middle[2, at]}
        columns |= {f"{name}_b_minus_a_low": low[at], f"{name}_b_minus_a_high": high[at]}
    table = pd.DataFrame(columns, index=rows(layers))
    for kind in ("invalid", "partial"):
        for letter, found in (("a", a), ("b", b)):
            table[f"{kind}_{letter}"] = [*found.counts[kind], found.counts[kind].sum()]
    table["inputs"] = a.inputs
    table.attrs = {"difference": "b minus a", "a": dict(run_a.attrs), "b": dict(run_b.attrs)}
    table.attrs |= {"matched": matched, "taus": list(thresholds(taus))}
    table.attrs |= {"confidence": confidence, "resamples": resamples, "bootstrap_seed": seed}
    return table


def _same_protocol(run_a: xr.Dataset, run_b: xr.Dataset) -> None:
    differ = {key: (run_a.attrs.get(key), run_b.attrs.get(key)) for key in PROTOCOL}
    said = [f"{key} is {a!r} in a and {b!r} in b" for key, (a, b) in differ.items() if a != b]
    if said:
        raise UnderstudyError(
            f"The runs do not measure the same thing: {'; '.join(said)}. "
            f"Models and searches may differ, {', '.join(PROTOCOL)} may not: measure one of them again."
        )


def _same_inputs(run_a: xr.Dataset, run_b: xr.Dataset) -> None:
    a, b = ([str(name) for name in run["input"].to_numpy()] for run in (run_a, run_b))
    for letter, names in (("a", a), ("b", b)):
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UnderstudyError(f"Inputs are paired by id, but run {letter} holds {twice!r} more than once.")
    if set(a) != set(b):
        common = len(set(a) & set(b))
        only = "; ".join(
            f"only in {letter}: {', '.join(sorted(rest)[:5])}{f' and {len(rest) - 5} more' if len(rest) > 5 else ''}"
            for letter, rest in (("a", set(a) - set(b)), ("b", set(b) - set(a)))
            if rest
        )
        raise UnderstudyError(
            f"Paired differences need the same inputs, but of {len(a)} in a and {len(b)} in b {common} are common "
            f"({only}). Measure both on the same inputs, or select the common ones with run.sel(input=[...])."
        )


def _common_layers(run_a: xr.Dataset, run_b: xr.Dataset) -> list[int]:
    a, b = ([int(layer) for layer in run["layer"].to_numpy()] for run in (run_a, run_b))
    common = [layer for layer in a if layer in b]
    if not common:
        raise UnderstudyError(
            f"No layer is common: a has {a}, b has {b}. Measure a common layer, or give one run's layers the "
            "indices of the other with run.assign_coords(layer=[...])."
        )
    return common
