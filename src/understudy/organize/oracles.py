"""How well the best substitute of a source does: among all candidates, and among m of them."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

from understudy.errors import UnderstudyError
from understudy.organize.candidates import Floats, candidates, valid


def raw_oracle(S: Floats) -> NDArray[np.float64]:
    """Return the Raw Oracle of each source, `O_raw[i] = max over j != i of S[i, j]`: `[..., source]`.

    >>> raw_oracle(np.array([[np.nan, 0.2, 0.3], [0.4, np.nan, 0.1], [np.nan, np.nan, np.nan]]))
    array([0.3, 0.4, nan])

    NaN for an invalid source. Where some candidates were not run it is the best of those that were.

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    choices = candidates(S).astype(np.float64)
    best = np.where(np.isnan(choices), -np.inf, choices).max(axis=-1, initial=-np.inf)
    return np.where(valid(S), best, np.nan)


def matched_oracle(S: Floats, m: int) -> NDArray[np.float64]:
    """Return the Matched Oracle, the expected best S among m candidates: `[..., source]`.

    With the n = H - 1 candidates of source i in rising order, S_(1) <= ... <= S_(n), and every candidate
    set of size m equally likely, exactly
    `O_matched[i] = sum over k of S_(k) * C(k - 1, m - 1) / C(n, m)`:
    S_(k) is the best of the sets that hold it and m - 1 of the k - 1 smaller ones.

    >>> S = np.array([[np.nan, 0.0, 0.3], [0.3, np.nan, 0.6], [0.9, 0.0, np.nan]])
    >>> matched_oracle(S, 1), matched_oracle(S, 2)
    (array([0.15, 0.45, 0.45]), array([0.3, 0.6, 0.9]))

    With n <= m it equals the Raw Oracle. NaN for an invalid source, and for one with a candidate that was not run.

    Args:
        S: substitutability, `[..., source, substitute]`.
        m: the size of the candidate sets, at least 1.

    """
    if not isinstance(m, int | np.integer) or m < 1:
        raise UnderstudyError(f"A candidate set cannot have size {m!r}: give a whole number, matched >= 1, as 2.")
    rising = np.sort(candidates(S).astype(np.float64), axis=-1)
    n = rising.shape[-1]
    if n == 0:
        return np.full(S.shape[:-1], np.nan)
    size = min(int(m), n)
    weights = np.array([comb(k - 1, size - 1) / comb(n, size) for k in range(1, n + 1)])
    # NaN times any weight, zero too, is NaN: a row that lacks an entry is not said.
    expected: NDArray[np.float64] = rising @ weights
    return expected
