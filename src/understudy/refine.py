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
_SAME = 1e-3  # alphas nearer than this are one point
_FAR = (LOW, 2.0, HIGH)  # where another valley would show
_NEAR = 0.5  # not looked at again this near to a point seen


@dataclass(frozen=True)
class Refine:
    """A safeguarded parabolic search over [0, 3], for all pairs at once.

    It starts from alpha = 1, where D is the drop and its slope is known from one backward for each source. The first
    step follows the slope, as far as the bend that the substitute's own drop suggests; the second goes to the vertex
    with the bend that the first one showed; then to the vertex through the three least points. Where a parabola
    misbehaves, the longer side of the bracket is cut by the golden section. A pair ends, and leaves the batch, when
    its parabola promises less than `tolerance` of its drop and was true, to `trust` of the drop, at the last look.

    A parabola knows one valley. Where one was untrue by more than `rough` of the drop, D is run at the bounds and at
    2 as well, and descended from there if it is less; so it is where less than `little` was recovered, hence nothing
    seen far from alpha = 1, if this happened to another pair of the same source. Every D* was run.
    """

    tolerance: float = 2e-5
    trust: float = 1e-3
    rough: float = 0.01
    little: float = 0.1
    rounds: int = 8

    @property
    def name(self) -> str:
        """How the search is written; with settings of one's own, these too."""
        own = {key: value for key, value in vars(self).items() if value != getattr(Refine(), key)}
        return "refine" + (f"({', '.join(f'{key}={value}' for key, value in own.items())})" if own else "")

    @property
    def zero(self) -> float:
        """A continuous search finds a little to gain almost everywhere."""
        return 1e-3

    def expected(self, units: int) -> float:  # noqa: ARG002
        """Between 2, where single units change little, and 6.4, where they change much, on trained models."""
        return 4.0

    @property
    def sloped(self) -> bool:
        """The slope at alpha = 1 saves more evaluations than it costs."""
        return True

    def best(self, pairs: Pairs, evaluate: Evaluate, seen: tuple[Tensor, Tensor] | None = None) -> Found:
        """The best alpha, for each pair; `seen` is a first look that was taken before, alpha and D."""
        assert pairs.slope is not None
        assert pairs.bend is not None
        points, every = _Points(pairs, evaluate), torch.arange(len(pairs))
        if seen is None:
            points.look(every, first_step(pairs.slope, pairs.bend))
        else:
            points.add(every, *seen)
        points.look(every, *second_step(pairs.drop, pairs.slope, points.alphas[:, 1], points.values[:, 1]))
        points.descend(every, self)

        damage, _ = points.least()
        untrue = points.error > self.rough
        doubtful = untrue | (pairs.any_of_source(untrue) & (damage > (1 - self.little) * pairs.drop))
        for alpha in _FAR:
            there = (doubtful & (points.distance(alpha) > _NEAR)).nonzero()[:, 0]
            points.look(there, torch.full((len(there),), alpha, dtype=torch.float64))
        points.descend((points.least()[0] < damage).nonzero()[:, 0], self)
        return Found.run(pairs, *points.least())


class _Points:
    """The points seen of each pair, `[pairs, looks]`: NaN and infinity where a pair was left out of a look."""

    def __init__(self, pairs: Pairs, evaluate: Evaluate) -> None:
        self._pairs, self._evaluate = pairs, evaluate
        self.alphas = torch.ones(len(pairs), 1, dtype=torch.float64)
        self.values = pairs.drop[:, None].clone()
        self.last = torch.full_like(pairs.drop, torch.inf)  # how untrue the parabola was at the last look / drop
        self.error = torch.zeros_like(pairs.drop)  # at the worst

    def look(self, which: Tensor, alpha: Tensor, predicted: Tensor | None = None) -> None:
        """Run the pairs `which` at these alphas, where a parabola predicted this D."""
        if not len(which):
            return
        value = self._pairs.run(which, alpha, self._evaluate)
        self.add(which, alpha, value)
        self.last[which] = torch.inf
        if predicted is not None:
            self.last[which] = (value - predicted).abs() / self._pairs.drop[which]
            self.error[which] = torch.maximum(self.error[which], self.last[which])

    def add(self, which: Tensor, alpha: Tensor, value: Tensor) -> None:
        """Keep what was seen of the pairs `which`."""
        column = torch.full((2, len(self._pairs)), torch.nan, dtype=torch.float64)
        column[1] = torch.inf
        column[0, which], column[1, which] = alpha, value
        self.alphas = torch.cat([self.alphas, column[0, :, None]], 1)
        self.values = torch.cat([self.values, column[1, :, None]], 1)

    def least(self) -> tuple[Tensor, Tensor]:
        """The least D seen of each pair, and its alpha."""
        damage, index = self.values.min(-1)
        return damage, self.alphas.gather(1, index[:, None])[:, 0]

    def distance(self, alpha: float) -> Tensor:
        """From alpha to the nearest point seen of each pair."""
        return (self.alphas - alpha).abs().nan_to_num(HIGH).amin(-1)

    def descend(self, active: Tensor, search: Refine) -> None:
        """Step to the vertex until it promises too little, and the last promise was kept."""
        for _ in range(search.rounds):
            enough = search.tolerance * self._pairs.drop[active]
            believed = self.last[active] <= search.trust
            target, predicted, going = vertex_step(self.alphas[active], self.values[active], enough, believed)
            active = active[going]
            if not len(active):
                return
            self.look(active, target[going], predicted[going])


def first_step(slope: Tensor, bend: Tensor) -> Tensor:
    """From alpha = 1, down the slope, as far as a guessed bend says."""
    size = (slope.abs() / bend.clamp(min=1e-30)).clamp(*_FIRST)
    return torch.where(slope > 0, 1 - size, 1 + size)  # never at 1, which is known, even on level ground


def second_step(drop: Tensor, slope: Tensor, alpha: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The vertex of the parabola that has the value and slope at alpha = 1 and one more value, and its D there."""
    step = alpha - 1
    bend = 2 * (value - drop - slope * step) / step**2
    bent = bend > 0
    # Bent downwards, or nearly straight, the least lies far beyond: step out, but not at once to the bound.
    move = torch.where(bent, (slope / bend.where(bent, torch.ones_like(bend))).abs(), torch.inf)
    target = 1 + torch.minimum(move, _OUT * step.abs()) * torch.sign(step)
    # A vertex on one of the two points that are known would show nothing new.
    near = 0.1 * step.abs()
    target = torch.where((target - alpha).abs() < near, alpha + 0.2 * step, target)
    target = torch.where((target - 1).abs() < near, 1 + 0.1 * step, target).clamp(LOW, HIGH)
    away = target - 1
    return target, torch.where(bent, drop + slope * away + 0.5 * bend * away**2, torch.inf)


def vertex_step(alphas: Tensor, values: Tensor, enough: Tensor, believed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The vertex through the three least points, inside the bracket of the best: where to look, what D, whether.

    alphas, values: the points seen, `[pairs, points]`, at least three. The three least, not the neighbours: a
    neighbour far out, where D grows faster than any parabola, would hold the search back. A gain of no more than
    `enough` is not worth a look where the parabola is `believed`; where not, the longer side of the bracket is
    looked at all the same.
    """
    least, index = values.topk(3, dim=-1, largest=False)
    (fa, fb, fc), (a, b, c) = least.unbind(-1), alphas.gather(1, index).unbind(-1)  # a is the best
    below, above = alphas < a[:, None], alphas > a[:, None]
    left, right = alphas.where(below, LOW).amax(-1), alphas.where(above, HIGH).amin(-1)

    # Newton's form: f = fa + (x − a) m + (x − a)(x − b) q
    m = (fb - fa) / (b - a)
    q = ((fc - fb) / (c - b) - m) / (c - a)
    bent = q > 0
    vertex = 0.5 * (a + b) - m / (2 * q.where(bent, torch.ones_like(q)))
    # Not further than a few times what the points span: beyond, a parabola is a guess.
    span = torch.maximum((b - a).abs(), (c - a).abs())
    vertex = torch.minimum(torch.maximum(vertex, a - _OUT * span), a + _OUT * span).clamp(LOW, HIGH)
    # A vertex on a point that was seen and is worse has been refuted.
    refuted = ((alphas - vertex[:, None]).abs() < _SAME) & (alphas != a[:, None])
    usable = bent & (vertex >= left) & (vertex <= right) & ~refuted.any(-1)
    # Not bent, and nothing seen on the far side of the best: the bound lies downhill.
    first, last = ~below.any(-1), ~above.any(-1)
    downhill = torch.where(first, LOW, HIGH).to(a.dtype)
    longer = torch.where(right - a > a - left, a + _GOLDEN * (right - a), a - _GOLDEN * (a - left))
    # At a bound with nothing seen near it, the least may still lie just inside.
    inward = ((a <= LOW) | (a >= HIGH)) & (right - left > _EDGE)
    usable &= ~inward
    target = torch.where(usable, vertex, torch.where(~bent & (first | last) & ~inward, downhill, longer))

    def parabola(x: Tensor) -> Tensor:
        return fa + (x - a) * m + (x - a) * (x - b) * q

    seen = (alphas - target[:, None]).abs().nan_to_num(HIGH).amin(-1) < _SAME
    little = seen | (usable & (fa - parabola(target) <= enough))
    aside = a + torch.minimum((longer - a).abs(), span) * torch.sign(longer - a)
    target = torch.where(little & ~believed, aside, target)
    return target, parabola(target), ~(little & believed) & (right - left >= _SAME)
