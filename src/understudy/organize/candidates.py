"""The candidates of each source, and which sources can be spoken of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.errors import UnderstudyError

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


def candidates(S: Floats) -> Floats:
    """Return S without its diagonal: for each source i the S[i, j] of its candidates j != i, in order of j.

    >>> candidates(np.array([[np.nan, 0.2, 0.3], [0.4, np.nan, 0.6], [0.7, 0.8, np.nan]]))
    array([[0.2, 0.3],
           [0.4, 0.6],
           [0.7, 0.8]])

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    if S.ndim < 2 or S.shape[-1] != S.shape[-2] or S.shape[-1] == 0:
        raise UnderstudyError(
            f"S has shape {S.shape}, but sources and substitutes are the same units: give [..., H, H] with H >= 1."
        )
    H = S.shape[-1]
    return S[..., ~np.eye(H, dtype=np.bool_)].reshape(*S.shape[:-1], H - 1)


def valid(S: Floats) -> Bools:
    """Return whether a source has any S: `[..., source]`. An invalid source (negligible drop) has none.

    >>> valid(np.array([[np.nan, 0.2], [np.nan, np.nan]]))
    array([ True, False])

    A unit alone in its layer has no candidate, so nothing can be said of it either.

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    found: Bools = np.any(~np.isnan(candidates(S)), axis=-1)
    return found


def partial(S: Floats) -> Bools:
    """Return whether a valid source lacks the S of some candidate, because that pair was not run: `[..., source]`.

    >>> partial(np.array([[np.nan, 0.2, np.nan], [0.4, np.nan, 0.6], [np.nan, np.nan, np.nan]]))
    array([ True, False, False])

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    lacks: Bools = np.any(np.isnan(candidates(S)), axis=-1)
    return lacks & valid(S)


def complete(S: Floats) -> Bools:
    """Return whether a whole matrix can be spoken of, some source being valid and none partial: `[...]`.

    >>> complete(np.array([[np.nan, 0.2], [np.nan, np.nan]]))
    array(True)

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    return np.asarray(np.any(valid(S), axis=-1) & ~np.any(partial(S), axis=-1))
