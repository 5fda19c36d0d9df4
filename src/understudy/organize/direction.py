"""How far substitution differs in its two directions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from understudy.organize.candidates import Floats


def both_ways(S: Floats) -> tuple[Floats, Floats]:
    """Return S[i, j] and S[j, i] of the unordered pairs i < j, (0, 1), (0, 2), ..., (H - 2, H - 1): `[..., pairs]`.

    >>> both_ways(np.array([[np.nan, 0.2], [0.5, np.nan]]))
    (array([0.2]), array([0.5]))

    Both are NaN where one is: of a pair with an invalid source, or one that was not run both ways, nothing is said.

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    i, j = np.triu_indices(S.shape[-1], k=1)
    there, back = S[..., i, j], S[..., j, i]
    unknown = np.isnan(there) | np.isnan(back)
    there[unknown] = back[unknown] = np.nan
    return there, back


def gap(S: Floats) -> NDArray[np.float64]:
    """Return the directional gap of each unordered pair, `Delta[i, j] = |S[i, j] - S[j, i]|`: `[..., pairs]`.

    >>> gap(np.array([[np.nan, 0.2], [0.5, np.nan]]))
    array([0.3])

    Args:
        S: substitutability, `[..., source, substitute]`; the order of pairs is that of `both_ways`.

    """
    there, back = both_ways(S)
    return np.abs(there.astype(np.float64) - back)


def one_sided(S: Floats, level: float, zero: float = 0.0) -> NDArray[np.float64]:
    """Return 1 for a pair with S > level in one direction and S <= zero in the reverse, else 0: `[..., pairs]`.

    >>> one_sided(np.array([[np.nan, 0.2], [0.0, np.nan]]), 0.10)
    array([1.])

    NaN where the pair is not known both ways.

    Args:
        S: substitutability, `[..., source, substitute]`; the order of pairs is that of `both_ways`.
        level: what the strong direction must exceed; the paper takes 0.10 and 0.25. Compared in the precision of S.
        zero: what counts as no substitution; 0 for grids, which hold alpha = 1 and so yield exact zeros.

    """
    there, back = both_ways(S)
    strong, none = float(level), float(zero)
    holds = ((there > strong) & (back <= none)) | ((back > strong) & (there <= none))
    return np.where(np.isnan(there), np.nan, holds.astype(np.float64))


def mean_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the last axis of what is not NaN, NaN where nothing is.

    >>> mean_known(np.array([[1.0, np.nan, 2.0], [np.nan, np.nan, np.nan]]))
    array([1.5, nan])
    """
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: NDArray[np.float64] = np.where(known, values, 0.0).sum(axis=-1) / known.sum(axis=-1)
    return mean


def quantile_known(values: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """Return the quantile over the last axis of what is not NaN (linear between ranks), NaN where nothing is.

    >>> quantile_known(np.array([[3.0, np.nan, 1.0], [np.nan, np.nan, np.nan]]), 0.5)
    array([ 2., nan])

    `numpy.nanquantile` runs a Python loop over rows and warns; here NaN sorts last and one index serves all rows.
    """
    if values.shape[-1] == 0:
        return np.full(values.shape[:-1], np.nan)
    rising = np.sort(values, axis=-1)
    place = q * np.maximum((~np.isnan(values)).sum(axis=-1, keepdims=True) - 1, 0)
    low = np.floor(place).astype(np.intp)
    high = np.ceil(place).astype(np.intp)
    below, above = np.take_along_axis(rising, low, -1), np.take_along_axis(rising, high, -1)
    found: NDArray[np.float64] = (below + (place - low) * (above - below))[..., 0]
    return found
