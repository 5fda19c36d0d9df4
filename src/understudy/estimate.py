"""estimate: the best compensation in closed form; screen: refine on the most promising substitutes only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.refine import Refine, first_step
from understudy.search import HIGH, LOW, Evaluate, Found, Pairs

_TRUST = 1.0  # how far from alpha = 1 a parabola through one trial is followed
_PROMISE = 0.75  # the weight of what such a parabola promises, against what the trial itself gave
_MORE = 2  # how many more than it keeps a screen tries


def closed_form(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """S and alpha of each pair, from the slope at alpha = 1 and the bend κ.

    `S(i→j) = max over δ in [−1, 2] of −(δ ∂D_i/∂g_j + ½ δ² κ_j) / D_i`, at most 1, and alpha = 1 + δ. κ_j is the
    Fisher norm of what removing j alone does to the outcome.
    """
    assert pairs.slope is not None
    assert pairs.bend is not None
    return _vertex(pairs, pairs.slope, pairs.bend.clamp(min=1e-30), HIGH - 1)


def cautious(pairs: Pairs) -> Pairs:
    """The pairs with bends of at least slope² / 2 D_i: with less, the parabola would fall below a divergence of 0."""
    assert pairs.slope is not None
    assert pairs.bend is not None
    return replace(pairs, bend=torch.maximum(pairs.bend, pairs.slope**2 / (2 * pairs.drop)))


def _vertex(pairs: Pairs, slope: Tensor, bend: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """S and alpha at the vertex of D = D_i + δ slope + ½ δ² bend, δ in [−1, most]."""
    step = (-slope / bend).clamp(LOW - 1, most)
    gain = -(step * slope + 0.5 * step**2 * bend)
    return (gain / pairs.drop).clamp(0.0, 1.0), 1 + step


def promising(pairs: Pairs, estimated: Tensor, count: int) -> Tensor:
    """The `count` best estimated pairs of each source, in rising order."""
    # A valid source has all other units as candidates, next to each other: [sources, units - 1].
    table = estimated.view(-1, pairs.units - 1)
    chosen = table.topk(min(count, pairs.units - 1), dim=-1).indices
    first = torch.arange(len(table))[:, None] * (pairs.units - 1)
    return (first + chosen).flatten().sort().values


def tried(pairs: Pairs, alpha: Tensor, damage: Tensor) -> tuple[Tensor, Tensor]:
    """S and alpha of each pair after one trial: what the parabola through slope and trial promises, tempered by it."""
    assert pairs.slope is not None
    step = alpha - 1
    bend = 2 * (damage - pairs.drop - pairs.slope * step) / step**2
    bent = bend > 0
    promise, vertex = _vertex(pairs, pairs.slope, bend.where(bent, torch.ones_like(bend)), _TRUST)
    run = 1 - damage / pairs.drop
    further = bent & (promise > run)
    promise = promise.where(further, run)
    # A trial that overshot says nothing against the parabola that it helped to find.
    return _PROMISE * promise + (1 - _PROMISE) * run.clamp(min=0.0), vertex.where(further, alpha)


@dataclass(frozen=True)
class Estimate:
    """The closed form: one forward and one backward for each source; no pair is run.

    Close where single units change little, as in language models; weaker in early layers of small models whose heads
    matter much. There, with `tries`, the most promising substitutes of each source are run once, at the alpha that
    the closed form names: they get the parabola through slope and trial, and the others are scaled by what the trials
    kept of their promise. `damage` is NaN throughout, since no D* was run.
    """

    tries: int = 0
    zero: float = 1e-3
    sloped: bool = True

    def __post_init__(self) -> None:
        if self.tries < 0:
            raise UnderstudyError(f"estimate:K tries at least 0 substitutes, but estimate:{self.tries} was given.")

    @property
    def name(self) -> str:
        """How the search is written."""
        return f"estimate:{self.tries}" if self.tries else "estimate"

    def expected(self, units: int) -> float:
        """The trials."""
        return min(1.0, self.tries / max(1, units - 1))

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        """What the closed form says of each pair, mended by the trials."""
        found, alpha = closed_form(cautious(pairs) if self.tries else pairs)
        if self.tries:
            which = promising(pairs, found, self.tries)
            some = pairs.only(which)
            there = _not_at_one(alpha[which], some)
            mended, alpha[which] = tried(some, there, pairs.run(which, there, evaluate))
            mended = mended.clamp(min=0.0)
            sources = (-1, min(self.tries, pairs.units - 1))
            kept = mended.view(sources).sum(-1) / found[which].view(sources).sum(-1).clamp(min=1e-30)
            found = found * kept.clamp(max=1.0).repeat_interleave(pairs.units - 1)
            found[which] = mended
        return Found(found, alpha, torch.full_like(found, torch.nan))


@dataclass(frozen=True)
class Screen:
    """`refine` on the k substitutes of each source that the closed form likes best; the others are NaN.

    Two more are tried once, and the best k go on. The Raw Oracle is then nearly that of `refine`;
    Matched, coverage, rank and direction cannot be said, unless k covers all.
    """

    k: int
    zero: float = 1e-3
    sloped: bool = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UnderstudyError(f"A screen needs at least 1 substitute, but screen:{self.k} was given.")

    @property
    def name(self) -> str:
        """How the search is written."""
        return f"screen:{self.k}"

    def expected(self, units: int) -> float:
        """The trials, and what refine takes after its first look."""
        others = max(1, units - 1)
        more = Refine().expected(units) - 1
        return (min(others, self.k + _MORE) + min(others, self.k) * more) / others

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        """Estimate all, try some, refine the best."""
        estimated, _ = closed_form(cautious(pairs))
        which = promising(pairs, estimated, self.k + _MORE)
        some = pairs.only(which)
        assert some.slope is not None
        assert some.bend is not None
        alpha = first_step(some.slope, some.bend)
        damage = pairs.run(which, alpha, evaluate)
        # The best k of each source's trials; with trials for fewer, all of them.
        score = torch.full_like(estimated, -torch.inf).index_put((which,), tried(some, alpha, damage)[0])
        kept = promising(pairs, score, self.k)
        place = torch.searchsorted(which, kept)
        run = Refine().best(pairs.only(kept), evaluate, seen=(alpha[place], damage[place]))
        blank = torch.full_like(estimated, torch.nan)
        return Found(*(blank.index_put((kept,), value) for value in vars(run).values()))


def _not_at_one(alpha: Tensor, pairs: Pairs) -> Tensor:
    """Not nearer to alpha = 1, which is known, than a first step."""
    assert pairs.slope is not None
    assert pairs.bend is not None
    return torch.where((alpha - 1).abs() < 0.15, first_step(pairs.slope, pairs.bend), alpha)
