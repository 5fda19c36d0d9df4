"""How far a run is, from the rows that were run."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float, int], None]  # matrices done (may be a fraction), and their number


class Meter:
    """Counts rows, and reports matrices (one input at one layer) done."""

    def __init__(self, report: Progress | None, total: int, done: int = 0) -> None:
        self._report, self._total = report, total
        self._done, self._rows, self._expected, self._share = float(done), 0, 1.0, 0
        self._marked = self._done

    def expect(self, matrices: int, rows: float) -> None:
        """The next `matrices` matrices take about this many rows in all."""
        self._expected, self._share = max(rows, 1.0), matrices

    def advance(self, rows: int) -> None:
        """Rows were run."""
        self._rows += rows
        self._tell(self._done + self._share * min(1.0, self._rows / self._expected))

    def close(self, matrices: int) -> None:
        """These matrices are done."""
        self._done, self._rows = self._done + matrices, 0
        self._tell(self._done)

    def mark(self) -> None:
        """A shard begins here."""
        self._marked = self._done

    def again(self) -> None:
        """What was done since the mark is lost and will be run once more."""
        self._done, self._rows = self._marked, 0
        self._tell(self._done)

    def _tell(self, done: float) -> None:
        if self._report is not None:
            self._report(done, self._total)
