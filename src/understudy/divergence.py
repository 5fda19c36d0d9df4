"""The divergence between two predictive distributions. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# Above this the shifted exponentials lose digits (or overflow), and the plain formula takes over.
LARGE = 16.0
PIECE = 2**19  # numbers that go through all steps together: more would leave the cache between them
FEW = 2**16  # numbers for which a step takes no longer than its call


def kl(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """D = KL(dense ‖ intervened) over the last axis, in nats, as float64.

    >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])
    >>> round(kl(a, probabilities(a), b.clone()).item(), 6)
    0.026345

    With Δ = logits − dense and d = Δ − E_p[Δ], exactly `KL = log1p(E_p[expm1(d) − d])`. No term is negative, and all
    are small where the distributions are close, so nothing cancels, and the logits' own precision (float32 at least)
    is enough up to the logarithm. `dense` and `p = probabilities(dense)` broadcast against `logits`, which may be
    overwritten.
    """
    return _piecewise(_kl, dense, p, logits, ())


def kl_and_bend(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """D, and the Fisher norm κ = Var_p(Δ) of the change: what D bends by along it, to second order. `[..., 2]`."""
    return _piecewise(_kl_and_bend, dense, p, logits, (2,))


def kl_plain(dense: Tensor, logits: Tensor) -> Tensor:
    """D by two float64 log-softmaxes: the definition, slower."""
    log_p, log_q = (torch.log_softmax(value.double(), -1) for value in (dense, logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the last axis, taken in float64 and kept in the logits' precision."""
    found = torch.empty_like(logits)
    for piece in _pieces(logits, logits.shape[-1:]):
        found[piece] = torch.softmax(logits[piece].double(), -1)
    return found


def _kl(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    return _kl_of_change(dense, p, _change(dense, p, logits))


def _kl_and_bend(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    d = _change(dense, p, logits)
    return torch.stack([_kl_of_change(dense, p, d), _expected(p, d.square())], -1)


def _change(dense: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """The centred change d = Δ − E_p[Δ], in the place of the logits."""
    d = logits.sub_(dense)
    return d.sub_(_expected(p, d)[..., None])


def _kl_of_change(dense: Tensor, p: Tensor, d: Tensor) -> Tensor:
    # E_p[d] is 0 but for rounding, which a shift common to all logits makes large; `expm1(d) − d` lets it enter at
    # second order, `expm1(d)` alone would at first.
    value = torch.log1p(_expected(p, torch.expm1(d).sub_(d)).double())
    far = ~(value < LARGE)  # not `>=`: NaN counts as far
    if bool(far.any()):
        there = dense.expand_as(d)[far]
        value[far] = kl_plain(there, there + d[far])
    return value.clamp_(min=0.0)


def _expected(p: Tensor, x: Tensor) -> Tensor:
    """E_p[x] over the last axis, as a matrix product: one pass over x."""
    if p.numel() == p.shape[-1] and x.ndim > 1:
        return torch.mv(x.reshape(-1, x.shape[-1]), p.flatten()).view(x.shape[:-1])
    found: Tensor = torch.einsum("...v,...v->...", x, p)
    return found


def _piecewise(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    dense: Tensor,
    p: Tensor,
    logits: Tensor,
    numbers: tuple[int, ...],
) -> Tensor:
    """The function on pieces that stay in the cache from its first step to its last."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        dense, p, logits = dense.float(), probabilities(dense.float()), logits.float()
    found = logits.new_empty((*logits.shape[:-1], *numbers), dtype=torch.float64)
    for piece in _pieces(logits, dense.shape):
        found[piece] = function(_at(dense, piece), _at(p, piece), logits[piece])
    return found


def _pieces(logits: Tensor, shared: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cuts of all axes but the last: down to rows that share their dense distribution, and at most PIECE numbers.

    shared: the shape of the dense logits, 1 where they broadcast. Few numbers are not worth a cut.
    """
    shape = logits.shape
    cpu = logits.device.type == "cpu"  # an accelerator gains from large pieces
    few, many = (FEW, PIECE) if cpu else (logits.numel(), logits.numel())
    own = [1] * (len(shape) - len(shared)) + [*shared[:-1]]
    open_cuts = [tuple(slice(0, size) for size in shape[:-1])]
    while open_cuts:
        cut = open_cuts.pop()
        sizes = [part.stop - part.start for part in cut]
        numbers = math.prod(sizes) * shape[-1]
        apart = [axis for axis, size in enumerate(sizes) if size > 1 and own[axis] > 1]
        axes = (apart if numbers > few else []) or ([*range(len(sizes))] if numbers > many else [])
        axis = max(axes, key=sizes.__getitem__, default=0)
        if not axes or sizes[axis] == 1:
            yield cut
            continue
        middle = cut[axis].start + sizes[axis] // 2
        halves = slice(middle, cut[axis].stop), slice(cut[axis].start, middle)
        open_cuts += [(*cut[:axis], half, *cut[axis + 1 :]) for half in halves]


def _at(value: Tensor, piece: tuple[slice, ...]) -> Tensor:
    """The piece of a tensor that broadcasts against the one that was cut."""
    lead = value.ndim - 1
    own = piece[len(piece) - lead :] if lead else ()
    return value[tuple(slice(None) if size == 1 else part for size, part in zip(value.shape, own, strict=False))]
