"""refine: the best compensation, continuous and in few evaluations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.search import HIGH, LOW, Evaluate, Found, Pairs

_FIRST = (0.15, 0.6)  # the first step: long enough to show the bend, short enough to stay where a parabola holds
_OUT = 4.0  # how many times further than the points seen a step may go
_GOLDEN = 0.381966
_EDGE = 0.5  # how near to a bound a point must have been seen for the bound to be believed
_NEAR = 0.1  # a bound this near to a point seen is not looked at again


@dataclass(frozen=True)
class Refine:
    """A safeguarded parabolic search over [0, 3], for all pairs at once.

    It starts from alpha = 1, where D is the drop and its slope is known from one backward for each source. The first
    step follows the slope, as far as the bend that the substitute's own drop suggests; the second goes to the vertex
    with the bend that the first one showed; then to the vertex through the three least points. Where a parabola
    misbehaves, the longer side of the bracket is cut by the golden section. A pair ends when its parabola promises
    less than `tolerance` of its drop, and leaves the batch. Where little was recovered, or so much is at stake that D
    need not have one valley only, the bounds are looked at too. Every D* was run.
    """

    tolerance: float = 2e-5
    rounds: int = 8
    little: float = 0.25  # recovered less than this share of the drop
    much: float = 0.1  # a drop above this many nats

    @property
    def name(self) -> str:
        """How the search is written."""
        return "refine"

    @property
    def zero(self) -> float:
        """A continuous search finds a little to gain almost everywhere."""
        return 1e-3

    @property
    def expected(self) -> float:
        """Seen on trained models."""
        return 4.5

    @property
    def sloped(self) -> bool:
        """The slope at alpha = 1 saves more evaluations than it costs."""
        return True

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        """The best alpha, for each pair."""
        assert pairs.slope is not None
        assert pairs.bend is not None
        points, every = _Points(pairs, evaluate), torch.arange(len(pairs))
        points.look(every, first_step(pairs.slope, pairs.bend))
        rise = points.values[:, 1] - pairs.drop
        points.look(every, second_step(pairs.slope, points.alphas[:, 1], rise))
        points.descend(every, self.tolerance, self.rounds)

        damage, _ = points.least()
        doubtful = ((damage > (1 - self.little) * pairs.drop) | (pairs.drop > self.much)).nonzero()[:, 0]
        for bound in (LOW, HIGH):
            far = (points.alphas[doubtful] - bound).abs().nan_to_num(HIGH).amin(-1) > _NEAR
            points.look(doubtful[far], torch.full((int(far.sum()),), bound, dtype=torch.float64))
        points.descend((points.least()[0] < damage).nonzero()[:, 0], self.tolerance, self.rounds)
        return Found.run(pairs, *points.least())


class _Points:
    """The points seen of each pair, `[pairs, looks]`: NaN and infinity where a pair was left out of a look."""

    def __init__(self, pairs: Pairs, evaluate: Evaluate) -> None:
        self._pairs, self._evaluate = pairs, evaluate
        self.alphas = torch.ones(len(pairs), 1, dtype=torch.float64)
        self.values = pairs.drop[:, None].clone()

    def look(self, which: Tensor, alpha: Tensor) -> None:
        """Run the pairs `which` at these alphas."""
        if not len(which):
            return
        column = torch.full((2, len(self._pairs)), torch.nan, dtype=torch.float64)
        column[1] = torch.inf
        column[0, which], column[1, which] = alpha, self._pairs.run(which, alpha, self._evaluate)
        self.alphas = torch.cat([self.alphas, column[0, :, None]], 1)
        self.values = torch.cat([self.values, column[1, :, None]], 1)

    def least(self) -> tuple[Tensor, Tensor]:
        """The least D seen of each pair, and its alpha."""
        damage, index = self.values.min(-1)
        return damage, self.alphas.gather(1, index[:, None])[:, 0]

    def descend(self, active: Tensor, tolerance: float, rounds: int) -> None:
        """Step to the vertex until it promises too little; a first promise is not believed."""
        for turn in range(rounds):
            target, gain = vertex_step(self.alphas[active], self.values[active], explore=turn == 0)
            going = gain > tolerance * self._pairs.drop[active]
            active, target = active[going], target[going]
            if not len(active):
                return
            self.look(active, target)


def first_step(slope: Tensor, bend: Tensor) -> Tensor:
    """From alpha = 1, down the slope, as far as a guessed bend says."""
    size = (slope.abs() / bend.clamp(min=1e-30)).clamp(*_FIRST)
    return 1 - size * torch.sign(slope)


def second_step(slope: Tensor, alpha: Tensor, rise: Tensor) -> Tensor:
    """From the value and slope at alpha = 1 and one more value: the vertex of the parabola that has all three."""
    step = alpha - 1
    bend = 2 * (rise - slope * step) / step.where(step != 0, torch.ones_like(step)) ** 2
    bent = bend > 0
    # Bent downwards, or nearly straight, the least lies far beyond: step out, but not at once to the bound.
    move = torch.where(bent, (slope / bend.where(bent, torch.ones_like(bend))).abs(), torch.inf)
    target = 1 + torch.minimum(move, _OUT * step.abs()) * torch.sign(step)
    # A vertex on the point that is known would show nothing new.
    return torch.where((target - alpha).abs() < 0.1 * step.abs(), alpha + 0.2 * step, target).clamp(LOW, HIGH)


def vertex_step(alphas: Tensor, values: Tensor, *, explore: bool = False) -> tuple[Tensor, Tensor]:
    """The vertex through the three least points, kept inside the bracket of the best: where to look, what to gain.

    alphas, values: the points seen, `[pairs, points]`, at least three. The three least, not the neighbours: a
    neighbour far out, where D grows faster than any parabola, would hold the search back. With `explore`, where the
    vertex promises nothing, the longer side of the bracket is looked at all the same.
    """
    least, index = values.topk(3, dim=-1, largest=False)
    (fa, fb, fc), (a, b, c) = least.unbind(-1), alphas.gather(1, index).unbind(-1)  # a is the best
    left = alphas.where(alphas < a[:, None], LOW).amax(-1)
    right = alphas.where(alphas > a[:, None], HIGH).amin(-1)

    # Newton's form: f = fa + (x − a) m + (x − a)(x − b) q
    m = (fb - fa) / (b - a)
    q = ((fc - fb) / (c - b) - m) / (c - a)
    bent = q > 0
    vertex = 0.5 * (a + b) - m / (2 * q.where(bent, torch.ones_like(q)))
    # Not further than a few times what the points span: beyond, a parabola is a guess.
    span = torch.maximum((b - a).abs(), (c - a).abs())
    vertex = torch.minimum(torch.maximum(vertex, a - _OUT * span), a + _OUT * span).clamp(LOW, HIGH)
    # A vertex on a point that was seen and is worse has been refuted.
    refuted = ((alphas - vertex[:, None]).abs() < 1e-3) & (alphas != a[:, None])
    usable = bent & (vertex >= left) & (vertex <= right) & ~refuted.any(-1)
    # Not bent, and nothing seen on the far side of the best: the bound lies downhill.
    downhill = torch.where(left <= LOW, LOW, HIGH).to(a.dtype)
    open_ended = ~bent & ((left <= LOW) | (right >= HIGH))
    longer = torch.where(right - a > a - left, a + _GOLDEN * (right - a), a - _GOLDEN * (a - left))
    # At a bound with nothing seen near it, the least may still lie just inside.
    inward = ((a <= LOW) | (a >= HIGH)) & (right - left > _EDGE)
    target = torch.where(inward, longer, torch.where(usable, vertex, torch.where(open_ended, downhill, longer)))
    gain = torch.where(usable & ~inward, -((target - a) * m + (target - a) * (target - b) * q), torch.inf)
    seen = (alphas - target[:, None]).abs().nan_to_num(HIGH).amin(-1) < 1e-3
    if explore:
        nothing = seen | (gain < 1e-3 * fa)
        near = torch.minimum((longer - a).abs(), span) * torch.sign(longer - a)
        target = torch.where(nothing, a + near, target)
        return target, torch.where(right - left < 1e-3, torch.zeros_like(gain), torch.full_like(gain, torch.inf))
    return target, torch.where(seen | (right - left < 1e-3), torch.zeros_like(gain), gain)
