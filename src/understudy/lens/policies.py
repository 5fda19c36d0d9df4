"""Who stands in, and how much louder: policies that choose the substitute and its alpha. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from understudy.errors import UnderstudyError
from understudy.organize.aggregate import with_all
from understudy.organize.bootstrap import interval, value
from understudy.organize.pooled import Array, pooled_mean


@dataclass(frozen=True)
class Split:
    """The inputs on which what is fixed is fitted, and those on which everything is evaluated."""

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]

    @classmethod
    def of(cls, ids: Sequence[str], calibration: float | Sequence[str]) -> Split:
        """Every so many-th input for calibration, or the ones named."""
        if not isinstance(calibration, float | int):
            named = [str(name) for name in calibration]
            if missing := [name for name in named if name not in ids]:
                raise UnderstudyError(f"The calibration split names {missing[0]!r}, which is no input of this run.")
        else:
            if not 0 < calibration < 1:
                raise UnderstudyError(f"calibration is a share of the inputs in (0, 1), but {calibration} was given.")
            count = round(calibration * len(ids))
            named = [ids[index] for index in np.linspace(0, len(ids) - 1, count).round().astype(int)] if count else []
        rest = tuple(name for name in ids if name not in set(named))
        if not named or not rest:
            raise UnderstudyError(
                f"The calibration split has {len(named)} of {len(ids)} inputs: both it and the rest need at least one."
            )
        return cls(tuple(named), rest)


def policies(
    curves: xr.Dataset,
    signals: xr.Dataset,
    *,
    calibration: float | Sequence[str] = 0.5,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Return mean S and mean KL of each policy, with intervals: the paper's Table 1(a).

    | policy | substitute j of source i | alpha |
    |---|---|---|
    | `drop` | none | none |
    | `fixed_fixed` | the j of least mean KL on the calibration split | its fixed one |
    | `l2_fixed` | the nearest contribution on this input | the pair's fixed one |
    | `conditional_fixed` | the best on this input, given fixed alphas | the pair's fixed one |
    | `random_oracle` | the mean over all candidates | the best on this input |
    | `l2_oracle`, `fixed_oracle` | as above | the best on this input |
    | `taylor_oracle` | the candidate with the largest `T_j` | the best on this input |
    | `conditional_oracle` | the best on this input | the best on this input |

    The fixed alpha of a pair minimises its mean KL on the calibration split; everything is evaluated on the other
    inputs, over valid sources: a mean over each layer's source-input pairs, then over layers. `S_gap` is the policy's
    mean S minus that of `conditional_oracle`, on the same resampled inputs. `unfitted` counts sources that were valid
    on no calibration input: at fixed alphas they recover nothing. The split is in `attrs`.
    """
    ids = [str(name) for name in curves["input"].values]
    split = Split.of(ids, calibration)
    fit, test = (curves.sel(input=list(part)) for part in (split.calibration, split.evaluation))
    near, strong = (signals[name].sel(input=list(split.evaluation)).values for name in ("proximity", "taylor"))
    D, drop = test["divergence"].values, test["drop"].values  # [input, layer, i, j, alpha], [input, layer, i]
    valid = np.isfinite(D).any((-1, -2))
    D = np.where(valid[..., None, None], D, np.nan)
    least = np.minimum(D.min(-1), drop[..., None])  # the best alpha of each pair; alpha = 1 is a candidate

    fitted = _known_mean(fit["divergence"].values, 0)  # [layer, i, j, alpha]
    alpha = _argmin(fitted)  # [layer, i, j]
    at_fixed = np.take_along_axis(D, np.broadcast_to(alpha, D.shape[:-1])[..., None], -1)[..., 0]
    # A source that is valid on no calibration input has nothing fitted: it is left as it is, which is the drop.
    known = np.isfinite(fitted).any(-1)
    at_fixed = np.where(known | np.isnan(at_fixed), at_fixed, drop[..., None])
    fixed = _argmin(np.take_along_axis(fitted, alpha[..., None], -1)[..., 0])  # [layer, i]

    fixed = np.broadcast_to(fixed, drop.shape)
    nearest = _argmax_other(near)
    strongest = _argmax_other(np.broadcast_to(strong[:, :, None], near.shape))
    damage = {
        "drop": np.where(valid, drop, np.nan),
        "fixed_fixed": _at(at_fixed, fixed),
        "l2_fixed": _at(at_fixed, nearest),
        "conditional_fixed": _at(at_fixed, _argmin(at_fixed)),
        "random_oracle": _known_mean(least, -1),
        "l2_oracle": _at(least, nearest),
        "fixed_oracle": _at(least, fixed),
        "taylor_oracle": _at(least, strongest),
        "conditional_oracle": _at(least, _argmin(least)),
    }
    # Where a policy has no candidate, nothing stands in.
    damage = {name: np.where(valid & ~np.isfinite(found), drop, found) for name, found in damage.items()}
    unfitted = int((valid & ~known.any(-1)).sum())
    return _table(damage, drop, split, unfitted, confidence=confidence, resamples=resamples, seed=seed)


def _table(
    damage: dict[str, Array], drop: Array, split: Split, unfitted: int, *, confidence: float, resamples: int, seed: int
) -> pd.DataFrame:
    """Means over valid sources, with the intervals of all policies on the same resampled inputs."""
    names, count = list(damage), len(drop)
    with np.errstate(invalid="ignore", divide="ignore"):
        recovered = {name: 1 - value / drop for name, value in damage.items()}
    columns = {}
    for column, found in (("S", recovered), ("kl", damage)):
        parts = [pooled_mean([each[:, layer] for layer in range(drop.shape[1])]) for each in found.values()]

        def statistic(draws: Array, parts: list[Any] = parts) -> Array:  # [policies, resamples]
            return np.stack([with_all(part(draws))[-1] for part in parts])

        columns[column] = value(statistic, count)
        ends = interval(statistic, count, confidence=confidence, resamples=resamples, seed=seed)
        columns[f"{column}_low"], columns[f"{column}_high"] = ends

        def gap(draws: Array, statistic: Any = statistic) -> Array:
            means = statistic(draws)
            return np.asarray(means - means[-1:])

        columns[f"{column}_gap"] = value(gap, count)
        ends = interval(gap, count, confidence=confidence, resamples=resamples, seed=seed)
        columns[f"{column}_gap_low"], columns[f"{column}_gap_high"] = ends
    table = pd.DataFrame(columns, index=pd.Index(names, name="policy"))
    table["sources"], table["unfitted"] = int(np.isfinite(damage["drop"]).sum()), unfitted
    table.attrs = {"calibration": list(split.calibration), "evaluation": list(split.evaluation)}
    return table


def _known_mean(values: Array, axis: int) -> Array:
    """The mean of what is a number; NaN where nothing is."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(known, values, 0.0).sum(axis) / known.sum(axis)
    return mean


def _argmin(values: Array) -> Any:
    """The least along the last axis; NaN never is."""
    return np.where(np.isfinite(values), values, np.inf).argmin(-1)


def _argmax_other(values: Array) -> Any:
    """The largest along the last axis that is not the source itself."""
    own = np.eye(values.shape[-1], dtype=bool)
    return np.where(own | ~np.isfinite(values), -np.inf, values).argmax(-1)


def _at(values: Array, chosen: Any) -> Array:
    return np.take_along_axis(values, chosen[..., None], -1)[..., 0]
