"""Retained subsets: all of a size, and the best one by a utility or by scores. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, islice

import numpy as np

from understudy.errors import UnderstudyError

# More subsets than this are no exact enumeration that anyone waits for.
LIMIT = 200_000

# Subsets that are looked at together.
_AT_ONCE = 4096
_NUMBERS = 2**22


def count_subsets(units: int, keep: int, limit: int = LIMIT) -> int:
    """C(units, keep), if that many can be enumerated.

    >>> count_subsets(12, 6)
    924
    """
    if not 1 <= keep <= units:
        raise UnderstudyError(f"A budget of {keep} is not possible: of {units} units, 1 to {units} can be kept.")
    count = math.comb(units, keep)
    if count > limit:
        raise UnderstudyError(
            f"There are {count:,} subsets of {keep} of {units} units, beyond the limit of {limit:,}: ask for a smaller "
            "or larger budget, or raise the limit."
        )
    return count


def default_budgets(units: int) -> tuple[int, ...]:
    """A quarter, a half and three quarters of the units.

    >>> default_budgets(12)
    (3, 6, 9)
    """
    return tuple(sorted({max(1, round(units * share)) for share in (0.25, 0.5, 0.75)}))


def subsets(units: int, keep: int, *, limit: int = LIMIT) -> Iterator[np.ndarray]:
    """All subsets of a size, in the order of `itertools.combinations`, as bool `[subsets, units]`, a part at a time."""
    count_subsets(units, keep, limit)
    every = combinations(range(units), keep)
    while part := list(islice(every, _AT_ONCE)):
        mask = np.zeros((len(part), units), dtype=bool)
        mask[np.arange(len(part))[:, None], np.array(part)] = True
        yield mask


def largest(scores: np.ndarray, keep: int) -> np.ndarray:
    """The `keep` units of largest score, of each row: bool of the same shape. Ties go to the lower unit."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=-1, kind="stable")[..., :keep]
    mask = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(mask, order, True, -1)
    return mask


def utility(S: np.ndarray, weight: np.ndarray, retained: np.ndarray) -> np.ndarray:
    """The paper's utility of retained sets: `Σ_i w_i · (1 if i ∈ R else max_{j ∈ R} clip(S(i→j), 0, 1))`.

    >>> S = np.array([[np.nan, 0.5], [0.2, np.nan]])
    >>> utility(S[None], np.array([[0.5, 0.5]]), np.array([[True, False]]))
    array([[0.6]])

    S: `[inputs, source, substitute]`, weight: `[inputs, source]`, retained: bool `[subsets, units]`. Returns
    `[inputs, subsets]`. What is NaN in S recovers nothing.
    """
    clipped = np.clip(np.nan_to_num(S, nan=0.0), 0, 1)
    covered = np.zeros((len(S), len(retained), S.shape[1]))
    for unit in range(S.shape[2]):  # one substitute after the other, so that no table of all three is held
        covered = np.maximum(covered, np.where(retained[:, unit, None], clipped[:, None, :, unit], 0.0))
    covered = np.where(retained, 1.0, covered)
    found: np.ndarray = (covered * weight[:, None]).sum(-1)
    return found


def best_by_utility(S: np.ndarray, weight: np.ndarray, keep: int, *, limit: int = LIMIT) -> np.ndarray:
    """The subset of largest utility for each input, exactly: bool `[inputs, units]`. Ties go to the first."""
    count, units = weight.shape
    step = max(1, _NUMBERS // (_AT_ONCE * units))  # inputs at a time: all of them would not fit
    if count > step:
        spans = [slice(start, start + step) for start in range(0, count, step)]
        return np.concatenate([best_by_utility(S[span], weight[span], keep, limit=limit) for span in spans])
    weight = np.nan_to_num(weight)
    best, chosen = np.full(count, -np.inf), np.zeros((count, units), dtype=bool)
    for part in subsets(units, keep, limit=limit):
        found = utility(S, weight, part)
        at = found.argmax(-1)
        value = found[np.arange(count), at]
        better = value > best
        best[better], chosen[better] = value[better], part[at[better]]
    return chosen
