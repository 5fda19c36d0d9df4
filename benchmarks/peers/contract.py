"""What a peer offers: ways to get D of many interventions on one input."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from benchmarks.cases import Case
from torch import Tensor


class CannotRun(Exception):
    """A peer cannot run a case; the message is one sentence that says why."""


class Way(ABC):
    """`way(gates)`: D `[rows]` of the gates `[rows, heads]` at the case's layer, on the case's first input.

    What has to be done once, such as wrapping the model and running it densely, is done when a way is made.
    """

    rows_at_once: int = 8
    extra_rows: int = 0  # how many rows each call runs besides those that were asked for

    @abstractmethod
    def __init__(self, case: Case) -> None: ...

    @abstractmethod
    def batch(self, gates: Tensor) -> Tensor:
        """D of the rows of one batch."""

    def __call__(self, gates: Tensor) -> Tensor:
        """D of each row, `rows_at_once` rows a batch."""
        with torch.inference_mode():
            return torch.cat([self.batch(part) for part in gates.split(self.rows_at_once)])
