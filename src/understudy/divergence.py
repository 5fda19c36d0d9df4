"""The divergence between two predictive distributions. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

# Above this the shifted exponentials lose digits (or overflow), and the plain formula takes over.
LARGE = 16.0
_RUN = 64


def kl(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """D = KL(dense ‖ intervened) over the last axis, in nats, as float64.

    >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])
    >>> round(kl(a, probabilities(a), b.clone()).item(), 6)
    0.026345

    With Δ = logits − dense and d = Δ − E_p[Δ], exactly `KL = log1p(E_p[expm1(d)])`. The terms are small where the
    distributions are close, so nothing cancels: elementwise work stays in the logits' own precision (float32 at
    least), and only the sums are float64. `dense` and `p = probabilities(dense)` broadcast against `logits`, which
    may be overwritten.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        dense, p, logits = dense.float(), probabilities(dense.float()), logits.float()
    d = logits.sub_(dense)
    d -= total(d * p)[..., None].to(d.dtype)
    # E_p[d] is 0 but for rounding, which a shift common to all logits makes large; without it the rounding
    # enters at first order, with it at second.
    value = torch.log1p(total(torch.expm1(d).sub_(d).mul_(p)))
    far = ~(value < LARGE)  # not `>=`: NaN counts as far
    if bool(far.any()):
        there = dense.expand_as(d)[far]
        value[far] = kl_plain(there, there + d[far])
    return value.clamp_(min=0.0)


def kl_and_bend(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """D, and the Fisher norm κ = Var_p(Δ) of the change: what D bends by along it, to second order. `[..., 2]`."""
    change = logits - dense
    spread = change - total(change * p)[..., None].to(change.dtype)
    return torch.stack([kl(dense, p, logits), total(spread.square_().mul_(p))], -1)


def total(terms: Tensor) -> Tensor:
    """The sum over the last axis in float64.

    Short runs are summed as they are, and only their sums in float64: casting every term would cost more than all
    else, and a run is too short to lose digits.
    """
    size = terms.shape[-1] // _RUN * _RUN
    runs = terms[..., :size].unflatten(-1, (-1, _RUN)).sum(-1) if size else terms[..., :0]  # type: ignore[no-untyped-call]
    return runs.sum(-1, dtype=torch.float64) + terms[..., size:].sum(-1, dtype=torch.float64)


def kl_plain(dense: Tensor, logits: Tensor) -> Tensor:
    """The same by two float64 log-softmaxes: the definition, slower."""
    log_p, log_q = (torch.log_softmax(value.double(), -1) for value in (dense, logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the last axis, taken in float64 and kept in the logits' precision."""
    return torch.softmax(logits.double(), -1).to(logits.dtype)
