"""Which units to keep: the exact argmax of the paper's utility over all subsets of a size, for many inputs at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.lens.subsets import subsets

# To list the subsets of 20 units takes less than to solve an integer programme for each input; beyond, far more.
LISTED = 20

_NUMBERS = 2**24  # held at once


def utilities(S: Tensor, share: Tensor, retained: Tensor) -> Tensor:
    """`U(R) = Σ_i w_i · (1 if i ∈ R else max_{j ∈ R} clip(S_ij, 0, 1))`, differentiable.

    S: `[inputs, source, substitute]`, share: `[inputs, source]`, retained: bool `[subsets, units]`, or
    `[inputs, subsets, units]`. Returns `[inputs, subsets]`. `lens.subsets.utility` says the same of arrays.
    """
    clipped = S.clamp(0, 1)
    kept = (retained if retained.ndim == 3 else retained[None]).mT.to(S.dtype).contiguous()  # [inputs, units, subsets]
    if torch.is_grad_enabled() and S.requires_grad:
        covered = torch.maximum(_stood_in(clipped, kept), kept)
    else:
        covered = kept.repeat(len(S) // len(kept), 1, 1)
        here = torch.empty_like(covered)
        for unit in range(S.shape[2]):
            torch.maximum(covered, torch.mul(clipped[:, :, unit, None], kept[:, None, unit], out=here), out=covered)
    return (share[:, None] @ covered).squeeze(1)  # of [inputs, source, subsets]


def _stood_in(clipped: Tensor, kept: Tensor) -> Tensor:
    """`max_{j ∈ R} S_ij` with its gradient: who is the largest is found first, and only that one has a gradient."""
    with torch.no_grad():
        best = torch.zeros(len(clipped), clipped.shape[1], kept.shape[2], dtype=kept.dtype, device=kept.device)
        by = torch.zeros_like(best, dtype=torch.long)
        for unit in range(clipped.shape[2]):
            here = clipped[:, :, unit, None] * kept[:, None, unit]
            by.masked_fill_(here > best, unit)
            best = torch.maximum(best, here)
    return clipped.gather(2, by) * (best > 0)


def select(S: Tensor, share: Tensor, keep: int) -> Tensor:
    """The subset of `keep` units with the largest utility for each input: bool `[inputs, units]`, exactly.

    >>> S = torch.tensor([[[0.0, 0.9, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    >>> select(S, torch.tensor([[0.4, 0.3, 0.3]]), 2)
    tensor([[ True, False,  True]])

    All subsets are listed up to 20 units; with more, HiGHS solves an integer programme for each input. Ties go to the
    first subset in lexicographic order.
    """
    units = S.shape[-1]
    if not 1 <= keep <= units:
        raise UnderstudyError(f"A budget of {keep} is not possible: of {units} units, 1 to {units} can be kept.")
    if units > LISTED:
        solved = [
            _solve(s, w, keep) for s, w in zip(S.double().cpu().numpy(), share.double().cpu().numpy(), strict=True)
        ]
        return torch.from_numpy(np.stack(solved)).to(S.device)
    every = listed(units, keep).to(S.device)
    step = max(1, _NUMBERS // (every.numel() * 4))
    chosen = [
        utilities(S[start : start + step], share[start : start + step], every).argmax(-1)
        for start in range(0, len(S), step)
    ]
    return every[torch.cat(chosen)]


@lru_cache(maxsize=16)
def listed(units: int, keep: int) -> Tensor:
    """All subsets of a size: bool `[subsets, units]`."""
    return torch.from_numpy(np.concatenate(list(subsets(units, keep))))


def _solve(S: np.ndarray, share: np.ndarray, keep: int) -> np.ndarray:
    """One input as an integer programme.

    r_j: j is kept. y_ij: j stands in for i. Maximize `Σ_i w_i (r_i + Σ_j S_ij y_ij)` with `y_ij ≤ r_j`,
    `Σ_j y_ij ≤ 1 − r_i` and `Σ_j r_j = keep`. With r whole the best y is whole too, so only r must be.
    """
    units = len(share)
    gain = np.clip(np.nan_to_num(S), 0, 1)
    np.fill_diagonal(gain, 0)
    pairs = units * units
    value = np.concatenate([share, (share[:, None] * gain).ravel()])
    whole = np.concatenate([np.ones(units), np.zeros(pairs)])
    at = np.arange(pairs)
    stands_in = np.zeros((pairs, units + pairs))
    stands_in[at, units + at], stands_in[at, at % units] = 1, -1
    one_each = np.zeros((units, units + pairs))
    one_each[np.arange(units), np.arange(units)] = 1
    one_each[at // units, units + at] = 1
    budget = np.concatenate([np.ones(units), np.zeros(pairs)])[None]
    constraints = [
        LinearConstraint(stands_in, -np.inf, 0),
        LinearConstraint(one_each, -np.inf, 1),
        LinearConstraint(budget, keep, keep),
    ]
    found = milp(-value, integrality=whole, bounds=Bounds(0, 1), constraints=constraints, options={"mip_rel_gap": 0})
    assert found.x is not None, found.message
    kept: np.ndarray = found.x[:units] > 0.5
    return kept
