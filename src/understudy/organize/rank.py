"""How many independent directions the substitution graph has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from understudy.organize.candidates import Floats, complete, valid


def effective_rank(S: Floats) -> NDArray[np.float64]:
    """Return the directed spectral effective rank R_eff, between 1 and H: `[...]`.

    `F[i, j] = clip(S[i, j], 0, 1)` for j != i and `F[i, i] = 1` where i is valid, else a row of zeros; with
    sigma_r the singular values of F and `p_r = sigma_r / sum over q of sigma_q`,
    `R_eff = exp(-sum over r of p_r * log(p_r))`.

    >>> effective_rank(np.array([[np.nan, 0.0], [-0.2, np.nan]])).round(6)
    np.float64(2.0)
    >>> effective_rank(np.array([[np.nan, 1.0], [1.0, np.nan]])).round(6)
    np.float64(1.0)

    Rank/H is this over H. NaN where no source is valid, and where a candidate of a valid source was not run.

    Args:
        S: substitutability, `[..., source, substitute]`.

    """
    F = np.where(np.eye(S.shape[-1], dtype=np.bool_), 1.0, np.clip(S.astype(np.float64), 0.0, 1.0))
    F = np.where(valid(S)[..., :, None] & complete(S)[..., None, None], F, 0.0)
    sigma = np.linalg.svd(F, compute_uv=False)  # [..., H]
    with np.errstate(invalid="ignore"):  # 0 / 0 where nothing is known, which gives the NaN it should
        p = sigma / sigma.sum(axis=-1, keepdims=True)
    R_eff: NDArray[np.float64] = np.exp(entr(p).sum(axis=-1))
    return R_eff
