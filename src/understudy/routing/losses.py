"""What a router is taught by: pairs, sources, compensation, and whole subsets. Pure.

Each is a mean over inputs. `stake` weighs them, one number an input: what is at stake differs by orders of magnitude
from input to input, and a mistake where much is at stake costs more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss, softplus

from understudy.routing.network import Prediction
from understudy.routing.subsets import utilities

# How far apart two utilities are that a softmax over subsets tells apart: of the order of a good subset's lead.
SHARPNESS = 0.02
# The same for KLs, in units of the distance from an input's best to its median subset.
KL_SHARPNESS = 0.05
# Below this difference two substitutes are as good as each other.
TIE = 0.02


def ranking(predicted: Tensor, S: Tensor, stake: Tensor | None = None) -> Tensor:
    """Pairs of substitutes in the right order: `log(1 + exp(−(Ŝ_ij − Ŝ_ik) / 0.1))`, weighed by the true lead."""
    lead = S[..., :, None] - S[..., None, :]  # [inputs, source, j, k]
    counts = torch.isfinite(lead) & (lead > TIE)
    weight = torch.where(counts, lead.clamp(max=1), torch.zeros_like(lead))
    gap = predicted[..., :, None] - predicted[..., None, :]
    return _mean(softplus(-gap / 0.1), weight, stake)


def regression(predicted: Tensor, S: Tensor, stake: Tensor | None = None) -> Tensor:
    """The distance of Ŝ from S where there is one; a large negative S is as bad as −1."""
    known = torch.isfinite(S)
    each = smooth_l1_loss(predicted, S.nan_to_num().clamp(-1, 1), beta=0.1, reduction="none")
    return _mean(each, known.to(each.dtype), stake)


def source_weight(predicted: Tensor, weight: Tensor, stake: Tensor | None = None) -> Tensor:
    """The cross-entropy of the predicted shares with `D_drop(i) / Σ D_drop`."""
    each = -(weight * predicted.log_softmax(-1)).sum(-1)
    return _mean(each, torch.ones_like(each), stake)


def compensation(predicted: Tensor, alpha: Tensor, S: Tensor, stake: Tensor | None = None) -> Tensor:
    """The distance of α̂ from the best alpha, weighed by what it recovers: where nothing is recovered none matters."""
    known = torch.isfinite(S) & torch.isfinite(alpha)
    each = smooth_l1_loss(predicted, alpha.nan_to_num(), beta=0.1, reduction="none")
    return _mean(each, torch.where(known, S.nan_to_num().clamp(0, 1), torch.zeros_like(each)), stake)


def structured(said: Prediction, S: Tensor, weight: Tensor, retained: Tensor, stake: Tensor | None = None) -> Tensor:
    """The cross-entropy between the softmax over subsets of the measured utility and of the predicted one."""
    with torch.no_grad():
        target = (utilities(S.nan_to_num(), weight, retained) / SHARPNESS).softmax(-1)
    each = -(target * _preferences(said, retained)).sum(-1)
    return _mean(each, torch.ones_like(each), stake)


def joint(said: Prediction, masks: Tensor, kl: Tensor) -> Tensor:
    """The same against what happened: masks `[inputs, masks, units]` and their KL when all else was removed together.

    Each input's KLs are taken in units of its own, the distance from its best to its median mask; the square root of
    that distance is its stake.
    """
    best, unit = _best_and_unit(kl)
    target = (-(kl - best) / (KL_SHARPNESS * unit)).softmax(-1)
    each = -(target * _preferences(said, masks)).sum(-1)
    return _mean(each, torch.ones_like(each), unit[:, 0].sqrt())


def regret(said: Prediction, masks: Tensor, kl: Tensor) -> Tensor:
    """The KL above the best mask's that is to be expected, if masks are drawn by the softmax over predicted utility.

    The cross-entropy does not tell a mask that is bad from one that is a disaster; this does. In the same units.
    """
    best, unit = _best_and_unit(kl)
    each = (_preferences(said, masks).exp() * (kl - best) / unit).sum(-1)
    return _mean(each, torch.ones_like(each), unit[:, 0].sqrt())


def _preferences(said: Prediction, retained: Tensor) -> Tensor:
    """The logarithm of the softmax over subsets of predicted utility."""
    return (utilities(said.S, said.share, retained) / SHARPNESS).log_softmax(-1)


def _best_and_unit(kl: Tensor) -> tuple[Tensor, Tensor]:
    best = kl.amin(-1, keepdim=True)
    return best, (kl.median(-1, keepdim=True).values - best).clamp(min=1e-9)


def _mean(each: Tensor, weight: Tensor, stake: Tensor | None) -> Tensor:
    """The mean of `each`, by weights of the same shape and by one number an input."""
    if stake is not None:
        weight = weight * stake.view(-1, *[1] * (weight.ndim - 1))
    return (weight * each).sum() / weight.sum().clamp(min=1e-9)
