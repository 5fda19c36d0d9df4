"""How a network is organised, for each input and layer of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from understudy.errors import UnderstudyError
from understudy.organize.candidates import Floats, complete, partial, valid
from understudy.organize.coverage import Invalid, coverage
from understudy.organize.direction import gap, mean_known, one_sided, quantile_known
from understudy.organize.oracles import matched_oracle, raw_oracle
from understudy.organize.rank import effective_rank
from understudy.store import MEASURED

DIMS = ("input", "layer", "source", "substitute")
# The levels at which the paper calls a relation strongly one-sided.
LEVELS = {"one_sided_10": 0.10, "one_sided_25": 0.25}


def organization(
    run: xr.Dataset, *, matched: int = 2, taus: float | Sequence[float] = (0.5,), invalid: Invalid = "retain"
) -> xr.Dataset:
    r"""Return the oracles, coverage, rank and directionality of every input and layer.

    >>> S = np.full((1, 1, 3, 3), 0.6)
    >>> run = xr.Dataset({"substitutability": (DIMS, S)}, {"input": ["a"], "layer": [11]})
    >>> organization(run).coverage.values.round(4)
    array([[[0.3333]]])

    | variable | dims | |
    |---|---|---|
    | `raw`, `matched` | input, layer, source | Raw and Matched Oracle |
    | `coverage` | input, layer, tau | \|R*\| / H |
    | `coverage_exempt` | input, layer, tau | the same, invalid sources needing no cover (beside "retain" only) |
    | `rank`, `rank_fraction` | input, layer | effective rank, and over H |
    | `gap_median`, `gap_upper` | input, layer | median and 75th percentile of the directional gap over pairs |
    | `one_sided_10`, `one_sided_25` | input, layer | share of pairs that are one-sided at 0.10, 0.25 |
    | `invalid`, `partial` | input, layer | count of invalid sources; of sources with candidates that were not run |

    What cannot be said is NaN: everything where no source is valid; all but `raw` where a candidate was not run.

    Args:
        run: the result of a measurement.
        matched: the number m of candidates of the Matched Oracle.
        taus: one or several thresholds of coverage, each in (0, 1].
        invalid: what `coverage` asks of invalid sources: "retain" (they must stay) or "exempt" (no cover needed).

    """
    measured, levels = substitutability(run), thresholds(taus)
    zero = float(run.attrs.get("zero", 0.0))
    layers = []
    for S in each_layer(measured):
        covers = [coverage(S, tau, invalid=invalid) for tau in levels]
        variables = {
            "raw": (("input", "source"), raw_oracle(S)),
            "matched": (("input", "source"), matched_oracle(S, matched)),
            "coverage": (("input", "tau"), np.stack(covers, axis=-1)),
            "rank": ("input", effective_rank(S)),
            "invalid": ("input", (~valid(S)).sum(axis=-1)),
            "partial": ("input", partial(S).sum(axis=-1)),
        }
        if invalid == "retain":
            exempt = [_exempt(S, tau, retained) for tau, retained in zip(levels, covers, strict=True)]
            variables["coverage_exempt"] = (("input", "tau"), np.stack(exempt, axis=-1))
        gaps = gap(only_complete(S))
        variables["gap_median"] = ("input", quantile_known(gaps, 0.5))
        variables["gap_upper"] = ("input", quantile_known(gaps, 0.75))
        for name, level in LEVELS.items():
            variables[name] = ("input", mean_known(one_sided(only_complete(S), level, zero)))
        layers.append(xr.Dataset(variables))
    result = xr.concat(layers, run["layer"]).transpose("input", "layer", ...)
    result = result.assign_coords(input=run["input"], source=run["source"], tau=list(levels))
    result["rank_fraction"] = result["rank"] / run.sizes["source"]
    return result.assign_attrs({**run.attrs, "matched": matched, "taus": list(levels), "invalid": invalid})


def _exempt(S: Floats, tau: float, retained: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coverage that exempts invalid sources, given the other one: they are equal where all are valid."""
    result = retained.copy()
    differ = ~valid(S).all(axis=-1)
    result[differ] = coverage(S[differ], tau, invalid="exempt")
    return result


def substitutability(run: xr.Dataset) -> xr.DataArray:
    """Return S of a run, refusing what is not a run."""
    if not isinstance(run, xr.Dataset) or "substitutability" not in run:
        held = sorted(map(str, run.data_vars)) if isinstance(run, xr.Dataset) else type(run).__name__
        raise UnderstudyError(
            f"A run is a Dataset with 'substitutability', but this is {held}: give what `measure` returned or stored."
        )
    S = run["substitutability"]
    if set(S.dims) != set(DIMS):
        raise UnderstudyError(
            f"'substitutability' has the dims {S.dims}, but needs {DIMS}: "
            "select with lists to keep them, as in run.sel(layer=[11])."
        )
    if S.sizes["input"] == 0 or S.sizes["layer"] == 0:
        raise UnderstudyError(f"The run is empty ({dict(S.sizes)}): measure at least one input at one layer.")
    return S.transpose(*DIMS)


def measured(*runs: xr.Dataset) -> list[xr.Dataset]:
    """The runs with those inputs alone that have numbers in every one of them; the others are in no mean."""
    without: set[object] = set()
    for run in runs:
        if "status" in run:
            without |= set(run["input"].to_numpy()[run["status"].to_numpy().astype(str) != MEASURED])
    if not without:
        return list(runs)
    kept = [run.isel(input=[name not in without for name in run["input"].to_numpy()]) for run in runs]
    if not kept[0].sizes["input"]:
        raise UnderstudyError("No input of this run was measured: its `status` says why.")
    return kept


def each_layer(S: xr.DataArray) -> Iterator[Floats]:
    """Yield S of one layer after the other, `[input, source, substitute]`, so that one layer is in memory at a time."""
    for index in range(S.sizes["layer"]):
        yield S.isel(layer=index).to_numpy()


def only_complete(S: Floats) -> Floats:
    """Return S with NaN for a whole matrix where some candidate of a valid source was not run."""
    return np.where(complete(S)[..., None, None], S, np.array(np.nan, S.dtype))


def thresholds(taus: float | Sequence[float]) -> tuple[float, ...]:
    """Return the taus as a tuple, refusing none and the same twice."""
    levels = tuple(float(tau) for tau in np.atleast_1d(np.asarray(taus, dtype=np.float64)))
    if not levels or len(set(levels)) != len(levels):
        raise UnderstudyError(f"taus is {taus}, but needs one or more different thresholds in (0, 1], as in (0.5,).")
    return levels
