"""estimate: the best compensation in closed form, and refine on the most promising substitutes only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.refine import Refine
from understudy.search import HIGH, LOW, Evaluate, Found, Pairs


def closed_form(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """S and alpha of each pair, from the slope at alpha = 1 and the bend κ.

    `S(i→j) = max over δ in [−1, 2] of −(δ ∂D_i/∂g_j + ½ δ² κ_j) / D_i`, at most 1, and alpha = 1 + δ. κ_j is the
    Fisher norm of what removing j alone does to the outcome.
    """
    assert pairs.slope is not None
    assert pairs.bend is not None
    step = (-pairs.slope / pairs.bend.clamp(min=1e-30)).clamp(LOW - 1, HIGH - 1)
    gain = -(step * pairs.slope + 0.5 * step**2 * pairs.bend)
    return (gain / pairs.drop).clamp(0.0, 1.0), 1 + step


@dataclass(frozen=True)
class Estimate:
    """The closed form: one forward and one backward for each source, no pair is ever run.

    `damage` is NaN throughout, since none was run. Close where single units change little, as in language models;
    weaker in early layers of small models whose heads matter much.
    """

    name: str = "estimate"
    zero: float = 1e-3
    expected: float = 0.0
    sloped: bool = True

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:  # noqa: ARG002
        """What the closed form says of each pair."""
        found, alpha = closed_form(pairs)
        return Found(found, alpha, torch.full_like(found, torch.nan))


@dataclass(frozen=True)
class Screen:
    """`refine` on the k substitutes of each source that the closed form likes best; the others are NaN.

    The Raw Oracle is then nearly that of `refine`; Matched, coverage, rank and direction cannot be said, unless k
    covers all.
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

    @property
    def expected(self) -> float:
        """About one evaluation for each pair of a layer of a dozen heads."""
        return 1.0

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        """Estimate all, run the best."""
        estimated, _ = closed_form(pairs)
        # A valid source has all other units as candidates, next to each other: [sources, units - 1].
        table = estimated.view(-1, pairs.units - 1)
        chosen = table.topk(min(self.k, pairs.units - 1), dim=-1).indices
        first = torch.arange(len(table))[:, None] * (pairs.units - 1)
        which = (first + chosen).flatten().sort().values
        run = Refine().best(pairs.only(which), evaluate)
        blank = torch.full_like(estimated, torch.nan)
        return Found(*(blank.index_put((which,), value) for value in vars(run).values()))
