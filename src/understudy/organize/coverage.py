"""The smallest set of units that can stand in for all others."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from understudy.errors import UnderstudyError
from understudy.organize.candidates import Bools, Floats, complete, valid
from understudy.organize.smallest_cover import smallest_cover

Invalid = Literal["retain", "exempt"]


def coverage(S: Floats, tau: float, *, invalid: Invalid = "retain") -> NDArray[np.float64]:
    """Return the Functional Coverage C_tau = |R*| / H, the size of the smallest representative set: `[...]`.

    `R* = argmin |R|` such that for every unit i: i in R, or `max over j in R of S[i, j] >= tau`.
    The minimum is exact.

    >>> S = np.array([[np.nan, 0.9, 0.0, 0.0], [0.2, np.nan, 0.0, 0.0], [0.0, 0.6, np.nan, 0.0], [np.nan] * 4])
    >>> coverage(S, 0.5), coverage(S, 0.5, invalid="exempt")
    (array(0.5), array(0.25))

    NaN where no source is valid, and where a candidate of a valid source was not run.

    Args:
        S: substitutability, `[..., source, substitute]`.
        tau: the recovery that counts as a substitution, in (0, 1]; compared in the precision of S.
        invalid: invalid sources "retain": must be in R themselves, "exempt": need no cover.
            Under both they may serve as substitutes.

    """
    size = representatives(S, tau, invalid=invalid).sum(axis=-1)
    return np.where(size > 0, size / S.shape[-1], np.nan)


def representatives(S: Floats, tau: float, *, invalid: Invalid = "retain") -> Bools:
    """Return the smallest representative set R* as a mask: bool, `[..., unit]`.

    >>> S = np.array([[np.nan, 0.9, 0.0], [0.2, np.nan, 0.0], [0.0, 0.6, np.nan]])
    >>> representatives(S, 0.5)
    array([False,  True, False])

    Of several smallest sets it is the one that comes first in lexicographic order when units are sorted by how
    many units they cover (most first), then by index. The mask is empty where coverage is NaN.

    Args:
        S: substitutability, `[..., source, substitute]`.
        tau: the recovery that counts as a substitution, in (0, 1]; compared in the precision of S.
        invalid: invalid sources "retain": must be in R themselves, "exempt": need no cover.

    """
    if not 0 < tau <= 1:
        raise UnderstudyError(f"tau is {tau}, but a share of recovered damage is in (0, 1]: the paper takes 0.5.")
    if invalid not in get_args(Invalid):
        raise UnderstudyError(f"invalid is {invalid!r}, but invalid sources can be {get_args(Invalid)}: give one.")
    known = complete(S)
    # An invalid source has no S >= tau, so its own place on the diagonal is all that can cover it.
    covers = np.greater_equal(S, float(tau)) | np.eye(S.shape[-1], dtype=np.bool_)
    if invalid == "exempt":
        covers |= ~valid(S)[..., :, None]
    chosen = np.zeros(S.shape[:-1], dtype=np.bool_)
    chosen[known] = _each_once(covers[known])
    return chosen


def _each_once(covers: Bools) -> Bools:
    """Return the smallest cover of each matrix, solving equal matrices once: inputs share many of them."""
    packed = np.packbits(covers.reshape(len(covers), covers.shape[1] ** 2), axis=1)
    _, first, back = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return smallest_cover(covers[first])[back]
