"""The divergence between two predictive distributions. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

# Above this the shifted exponentials lose digits (or overflow), and the plain formula takes over.
LARGE = 16.0


def kl(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """D = KL(dense ‖ intervened) over the last axis, in nats, as float64.

    >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])
    >>> round(kl(a, probabilities(a), b).item(), 6)
    0.026604

    With Δ = logits − dense and d = Δ − E_p[Δ], exactly `KL = log1p(E_p[expm1(d)])`. The terms are small where the
    distributions are close, so nothing cancels: elementwise work stays in the logits' own precision, and only the
    sums are float64. `dense` and `p = probabilities(dense)` broadcast against `logits`.
    """
    delta = logits - dense
    mean = (delta * p).sum(-1, keepdim=True, dtype=torch.float64)
    delta -= mean.to(delta.dtype)
    value = torch.log1p((torch.expm1(delta).mul_(p)).sum(-1, dtype=torch.float64))
    far = ~(value < LARGE)  # not `>=`: NaN counts as far
    if bool(far.any()):
        value[far] = kl_plain(dense.expand_as(logits)[far], logits[far])
    return value.clamp_(min=0.0)


def kl_plain(dense: Tensor, logits: Tensor) -> Tensor:
    """The same by two float64 log-softmaxes: the definition, slower."""
    log_p, log_q = (torch.log_softmax(value.double(), -1) for value in (dense, logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the last axis, taken in float64 and kept in the logits' precision."""
    return torch.softmax(logits.double(), -1).to(logits.dtype)
