"""The smallest sets of columns that cover the rows of boolean matrices, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

Bools = NDArray[np.bool_]

# Measured on one core: to list the subsets of 20 columns takes some 17 ms, HiGHS 30 to 45 ms for the same
# matrix; each further column doubles the first and hardly changes the second.
LISTED = 20
# Subsets held at once while listing: 16 MB of row masks.
HELD = 1 << 21
# Powers of two up to 2**11 as weights of one objective stay far above HiGHS's integrality tolerance (1e-6).
WEIGHED = 12


def smallest_cover(covers: Bools, *, listed: int = LISTED) -> Bools:
    """Return the smallest sets R such that every row i has a column j in R with `covers[..., i, j]`.

    >>> covers = np.array([[True, True, False], [False, True, False], [False, False, True]])
    >>> smallest_cover(covers[None])
    array([[False,  True,  True]])

    Several sets may be smallest. The one returned comes first in lexicographic order when the columns
    are sorted by how many rows they cover (most first), then by index: a rule about one matrix alone, so the
    answer depends neither on the other matrices nor on the method.

    Args:
        covers: bool, `[matrices, rows, columns]`. Each row must have a column that covers it.
        listed: with at most this many columns left after reduction all subsets are listed;
            with more, HiGHS solves the integer programme.

    """
    assert covers.any(axis=2).all(), "a row that no column covers has no cover"
    order = np.argsort(-covers.sum(axis=1), axis=1, kind="stable")  # [matrices, columns]
    ranked = np.take_along_axis(covers, order[:, None, :], axis=2)
    chosen, rows, columns = _reduce(ranked)
    left = np.where(rows.any(axis=1), columns.sum(axis=1), 0)
    for count in np.unique(left[left > 0]):
        which = np.flatnonzero(left == count)
        # the columns left, in their order: [which, count]
        kept = np.argsort(~columns[which], axis=1, kind="stable")[:, :count]
        core = np.take_along_axis(ranked[which], kept[:, None, :], axis=2) | ~rows[which][:, :, None]
        if count <= listed and core.shape[1] <= 64:
            step = max(1, HELD >> int(count))
            picked = np.concatenate([_list(core[at : at + step]) for at in range(0, len(core), step)])
        else:
            picked = np.stack([_solve(matrix) for matrix in core])
        chosen[which[:, None], kept] |= picked
    result = np.zeros_like(chosen)
    np.put_along_axis(result, order, chosen, axis=1)
    return result


def _reduce(covers: Bools) -> tuple[Bools, Bools, Bools]:
    """Return the columns that must be in the cover, and the rows and columns that are left to decide."""
    matrices, height, width = covers.shape
    chosen = np.zeros((matrices, width), dtype=np.bool_)
    rows = np.ones((matrices, height), dtype=np.bool_)
    columns = np.ones((matrices, width), dtype=np.bool_)
    before = -1
    while before != (before := int(rows.sum() + columns.sum())):
        left = covers & rows[:, :, None] & columns[:, None, :]
        # A row with one column left forces that column.
        forced = (left & (left.sum(axis=2, keepdims=True) == 1)).any(axis=1)
        chosen |= forced
        rows &= ~(left & forced[:, None, :]).any(axis=2)
        columns &= ~forced
        # A column whose rows an earlier one covers too is never in the first smallest cover. (A later one
        # may be better for the size, but the earlier one may come first.)
        left = covers & rows[:, :, None] & columns[:, None, :]
        within = _within(left.swapaxes(1, 2)) & columns[:, :, None] & columns[:, None, :]
        columns &= left.any(axis=1) & ~(within & np.tri(width, k=-1, dtype=np.bool_)).any(axis=2)
        # A row is covered whenever a row with fewer columns is; of equal rows the first stays.
        left = covers & rows[:, :, None] & columns[:, None, :]
        within = _within(left) & rows[:, :, None] & rows[:, None, :]
        implied = within & (~within.swapaxes(1, 2) | np.tri(height, k=-1, dtype=np.bool_).T)
        rows &= ~implied.any(axis=1)
    return chosen, rows, columns


def _within(sets: Bools) -> Bools:
    """Return whether set a lies within set b: `[matrices, a, b]` of `[matrices, set, member]`."""
    indicator = sets.astype(np.float32)  # a product of floats uses BLAS; counts up to 2**24 are exact
    common: Bools = indicator @ indicator.swapaxes(1, 2) == indicator.sum(axis=2)[:, :, None]
    return common


def _list(covers: Bools) -> Bools:
    """Return the first smallest cover of each matrix, all subsets of its columns listed."""
    height, width = covers.shape[1:]
    bits = np.uint64(1) << np.arange(height, dtype=np.uint64)
    reach = np.where(covers, bits[:, None], np.uint64(0)).sum(axis=1, dtype=np.uint64)  # [matrices, columns]
    # Subset number s holds column c if bit (width - 1 - c) of s is set: a larger s comes first.
    union = np.zeros((len(covers), 1 << width), dtype=np.uint64)
    for bit in range(width):
        half = 1 << bit
        np.bitwise_or(union[:, :half], reach[:, width - 1 - bit, None], out=union[:, half : 2 * half])
    subset = np.arange(1 << width)
    size = np.bitwise_count(subset).astype(np.int64)
    key = (size << width) + (subset[-1] - subset)
    best = np.where(union == bits.sum(dtype=np.uint64), key, np.iinfo(np.int64).max).min(axis=1)
    number = subset[-1] - (best & subset[-1])
    picked: Bools = (number[:, None] >> np.arange(width - 1, -1, -1)) % 2 == 1
    return picked


def _solve(covers: Bools) -> Bools:
    """Return the first smallest cover of one matrix by integer programmes."""
    width = covers.shape[1]
    covered = LinearConstraint(np.unique(covers, axis=0).astype(float), lb=1)
    low, high = np.zeros(width), np.ones(width)

    def least(cost: NDArray[np.float64], *more: LinearConstraint) -> Bools:
        found = milp(
            cost, integrality=1, bounds=Bounds(low, high), constraints=[covered, *more], options={"mip_rel_gap": 0}
        )
        assert found.success, f"HiGHS did not solve a cover that has a solution: {found.message}"
        picked: Bools = found.x > 0.5
        return picked

    picked = least(np.ones(width))
    same_size = LinearConstraint(np.ones((1, width)), lb=picked.sum(), ub=picked.sum())
    for at in range(0, width, WEIGHED):
        part = np.arange(at, min(at + WEIGHED, width))
        cost = np.zeros(width)
        cost[part] = -(2.0 ** np.arange(len(part) - 1, -1, -1))
        picked = least(cost, same_size)
        low[part] = high[part] = picked[part]
    return picked
