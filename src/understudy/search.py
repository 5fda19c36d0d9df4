"""The best compensation for each pair of source and substitute, by running interventions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    def __len__(self) -> int:
        return len(self.owner)

    def gates(self, alpha: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The interventions of pairs [start, stop) at every alpha: gates `[pairs * alphas, units]` and their owners."""
        count = (stop - start) * len(alpha)
        gates = torch.ones(count, self.units, dtype=alpha.dtype, device=alpha.device)
        rows = torch.arange(count, device=alpha.device)
        repeat = len(alpha)
        gates[rows, self.substitute[start:stop].repeat_interleave(repeat)] = alpha.repeat(stop - start)
        gates[rows, self.source[start:stop].repeat_interleave(repeat)] = 0.0
        return gates, self.owner[start:stop].repeat_interleave(repeat)


class Search(Protocol):
    """A way to find the best compensation."""

    @property
    def name(self) -> str:
        """How the search is written in `measure(search=...)` and in results."""

    @property
    def zero(self) -> float:
        """An S at or below this says that nothing was recovered."""

    @property
    def expected(self) -> float:
        """About how many evaluations a pair takes."""

    def best(self, pairs: Pairs, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
        """D* and the alpha that gave it, for each pair; every D* was run."""


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

    @property
    def expected(self) -> float:
        """One evaluation for each alpha but 1."""
        return float(len(self._run()))

    def alphas(self) -> Tensor:
        """The points of the grid."""
        return torch.linspace(LOW, HIGH, self.points, dtype=torch.float64)

    def _run(self) -> Tensor:
        grid = self.alphas()
        return grid[(grid - 1).abs() > 1e-12]

    def best(self, pairs: Pairs, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
        """D* and alpha on the grid, for each pair."""
        run = self._run()
        damage, alpha = pairs.drop.clone(), torch.ones_like(pairs.drop)
        step = max(1, _GATES_AT_ONCE // (len(run) * pairs.units))
        for start in range(0, len(pairs), step):
            stop = min(start + step, len(pairs))
            found, index = evaluate(*pairs.gates(run, start, stop)).view(stop - start, -1).min(-1)
            better = found < damage[start:stop]
            damage[start:stop] = torch.where(better, found, damage[start:stop])
            alpha[start:stop] = torch.where(better, run[index], alpha[start:stop])
        return damage, alpha


def as_search(search: str | Search) -> Search:
    """A search by its name, or as it is."""
    if hasattr(search, "best"):
        return search  # type: ignore[return-value]
    kind, _, number = str(search).partition(":")
    if kind == "grid" and number.isascii() and number.isdecimal():
        return Grid(int(number))
    raise UnderstudyError(f"Search {search!r} is not known: possible are 'grid:N', for example 'grid:31' or 'grid:16'.")
