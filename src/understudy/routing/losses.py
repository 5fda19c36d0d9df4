"""What a router is taught by: pairs, sources, compensation, and whole subsets. Pure."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss, softplus

from understudy.routing.network import Prediction
from understudy.routing.subsets import utilities

# How far apart two utilities are that a softmax over subsets tells apart: of the order of a good subset's lead.
SHARPNESS = 0.02
# Below this difference two substitutes are as good as each other.
TIE = 0.02


def ranking(predicted: Tensor, S: Tensor) -> Tensor:
    """Pairs of substitutes in the right order: `log(1 + exp(−(Ŝ_ij − Ŝ_ik) / 0.1))`, weighed by the true lead."""
    lead = S[..., :, None] - S[..., None, :]  # [inputs, source, j, k]
    counts = torch.isfinite(lead) & (lead > TIE)
    weight = torch.where(counts, lead.clamp(max=1), torch.zeros_like(lead))
    gap = predicted[..., :, None] - predicted[..., None, :]
    return (weight * softplus(-gap / 0.1)).sum() / weight.sum().clamp(min=1e-9)


def regression(predicted: Tensor, S: Tensor) -> Tensor:
    """The distance of Ŝ from S where there is one; a large negative S is as bad as −1."""
    known = torch.isfinite(S)
    return smooth_l1_loss(predicted[known], S[known].clamp(-1, 1), beta=0.1)


def source_weight(predicted: Tensor, weight: Tensor) -> Tensor:
    """The cross-entropy of the predicted shares with `D_drop(i) / Σ D_drop`."""
    return -(weight * predicted.log_softmax(-1)).sum(-1).mean()


def compensation(predicted: Tensor, alpha: Tensor, S: Tensor) -> Tensor:
    """The distance of α̂ from the best alpha, weighed by what it recovers: where nothing is recovered none matters."""
    known = torch.isfinite(S) & torch.isfinite(alpha)
    weight = S[known].clamp(0, 1)
    each = smooth_l1_loss(predicted[known], alpha[known], beta=0.1, reduction="none")
    return (weight * each).sum() / weight.sum().clamp(min=1e-9)


def structured(said: Prediction, S: Tensor, weight: Tensor, retained: Tensor) -> Tensor:
    """The cross-entropy between the softmax over subsets of the measured utility and of the predicted one."""
    with torch.no_grad():
        target = (utilities(S.nan_to_num(), weight, retained) / SHARPNESS).softmax(-1)
    found = (utilities(said.S, said.share, retained) / SHARPNESS).log_softmax(-1)
    return -(target * found).sum(-1).mean()


def joint(said: Prediction, masks: Tensor, kl: Tensor) -> Tensor:
    """The same against what happened: masks `[inputs, masks, units]` and their KL when all else was removed together.

    KLs of inputs differ by orders of magnitude: each input's are taken in units of its own, the distance from the best
    to the median mask.
    """
    with torch.no_grad():
        best = kl.amin(-1, keepdim=True)
        unit = (kl.median(-1, keepdim=True).values - best).clamp(min=1e-9)
        target = (-(kl - best) / (0.2 * unit)).softmax(-1)
    found = (utilities(said.S, said.share, masks) / SHARPNESS).log_softmax(-1)
    return -(target * found).sum(-1).mean()
