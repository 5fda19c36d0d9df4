"""The best compensation for each pair of source and substitute, by running interventions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from understudy.errors import UnderstudyError

# (gates [rows, units], owner [rows]) -> D [rows], float64; owner is sorted.
Evaluate = Callable[[Tensor, Tensor], Tensor]

LOW, HIGH = 0.0, 3.0  # the paper's range of alpha

# Gates are built for this many numbers at a time: pairs x alphas x units of a large model would not fit at once.
_GATES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Pairs:
    """The pairs to search, sorted by input: unit `source[p]` of input `owner[p]` removed, `substitute[p]` rescaled."""

    owner: Tensor
    source: Tensor
    substitute: Tensor
    drop: Tensor  # D_drop of the source: what alpha = 1 gives, known before the search
    units: int
    slope: Tensor | None = None  # ∂D/∂alpha at alpha = 1, where the search asked for it
    bend: Tensor | None = None  # ∂²D/∂alpha² there, as the substitute's own drop suggests it: κ, its Fisher norm

    def __len__(self) -> int:
        return len(self.owner)

    def only(self, which: Tensor) -> Pairs:
        """These pairs alone."""
        fields = {name: getattr(self, name) for name in ("owner", "source", "substitute", "drop", "slope", "bend")}
        return replace(self, **{name: value[which] for name, value in fields.items() if value is not None})

    def any_of_source(self, marked: Tensor) -> Tensor:
        """Which pairs share their input and source with a marked one."""
        group = self.owner * self.units + self.source
        return torch.isin(group, group[marked])

    def gates(self, which: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """The interventions of the pairs `which` at their alphas: gates `[rows, units]` and their owners."""
        gates = torch.ones(len(which), self.units, dtype=alpha.dtype)
        rows = torch.arange(len(which))
        gates[rows, self.substitute[which]] = alpha
        gates[rows, self.source[which]] = 0.0
        return gates, self.owner[which]

    def run(self, which: Tensor, alpha: Tensor, evaluate: Evaluate) -> Tensor:
        """D of the pairs `which` (sorted) at their alphas."""
        step = max(1, _GATES_AT_ONCE // self.units)
        spans = [slice(start, start + step) for start in range(0, len(which), step)]
        return torch.cat([evaluate(*self.gates(which[span], alpha[span])) for span in spans])


@dataclass(frozen=True)
class Found:
    """What a search says of each pair: S, its alpha, and the D* that was run there (NaN where none was)."""

    substitutability: Tensor
    compensation: Tensor
    damage: Tensor

    @classmethod
    def run(cls, pairs: Pairs, damage: Tensor, alpha: Tensor) -> Found:
        """What was run: S = 1 − D*/D_drop."""
        return cls(1 - damage / pairs.drop, alpha, damage)


class Search(Protocol):
    """A way to find the best compensation."""

    @property
    def name(self) -> str:
        """How the search is written in `measure(search=...)` and in results."""

    @property
    def zero(self) -> float:
        """An S at or below this says that nothing was recovered."""

    def expected(self, units: int) -> float:
        """About how many evaluations a pair takes, in a layer of so many units."""

    @property
    def sloped(self) -> bool:
        """Whether the search starts from the slope at alpha = 1."""

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        """The best compensation of each pair; every D* was run."""


@dataclass(frozen=True)
class Grid:
    """The paper's protocol: alpha on an even grid over [0, 3].

    >>> Grid(31).alphas()[:4]
    tensor([0.0000, 0.1000, 0.2000, 0.3000], dtype=torch.float64)

    alpha = 1 is always a candidate and is never run: it is the drop itself.
    """

    points: int

    def __post_init__(self) -> None:
        if self.points < 2:
            raise UnderstudyError(f"A grid needs at least 2 points, but grid:{self.points} was given.")

    @property
    def name(self) -> str:
        """How the search is written."""
        return f"grid:{self.points}"

    @property
    def zero(self) -> float:
        """A grid yields exact zeros: where alpha = 1 is best, D* is D_drop."""
        return 0.0

    def expected(self, units: int) -> float:  # noqa: ARG002
        """One evaluation for each alpha but 1."""
        return float(len(self._run()))

    @property
    def sloped(self) -> bool:
        """A grid knows where it looks."""
        return False

    def alphas(self) -> Tensor:
        """The points of the grid."""
        return torch.linspace(LOW, HIGH, self.points, dtype=torch.float64)

    def _run(self) -> Tensor:
        grid = self.alphas()
        return grid[(grid - 1).abs() > 1e-12]

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        """The best alpha on the grid, for each pair."""
        grid = self._run()
        which = torch.arange(len(pairs)).repeat_interleave(len(grid))
        found, index = pairs.run(which, grid.repeat(len(pairs)), evaluate).view(len(pairs), -1).min(-1)
        better = found < pairs.drop
        return Found.run(pairs, torch.where(better, found, pairs.drop), torch.where(better, grid[index], 1.0))


def as_search(search: str | Search) -> Search:
    """A search by its name, or as it is."""
    if hasattr(search, "best"):
        return search  # type: ignore[return-value]
    if search == "refine":
        from understudy.refine import Refine

        return Refine()
    if search == "estimate":
        from understudy.estimate import Estimate

        return Estimate()
    kind, _, number = str(search).partition(":")
    if number.isascii() and number.isdecimal():
        if kind == "grid":
            return Grid(int(number))
        if kind in ("screen", "estimate"):
            from understudy.estimate import Estimate, Screen

            return Screen(int(number)) if kind == "screen" else Estimate(int(number))
    raise UnderstudyError(
        f"Search {search!r} is not known: possible are 'refine', 'grid:N', 'screen:K', 'estimate' and 'estimate:K'."
    )
