"""What every recipe is: a name, a sentence, one way to train and one to describe what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

# Called after every optimizer step with the steps done and the steps in all.
Progress = Callable[[int, int], None]


class Recipe(Protocol):
    """A frozen set of hyperparameters that trains one model into a folder."""

    @property
    def name(self) -> str:
        """The name of the recipe and of the model that it makes."""

    @property
    def summary(self) -> str:
        """One sentence that says what is trained on what."""

    def train(self, out: Path, *, seed: int, progress: Progress | None, **arguments: Any) -> bool:
        """Train into `out`; `arguments` go to `transformers.TrainingArguments` over the recipe's own.

        False on all but one process of a distributed run: that one has written the files.
        """

    def describe(self, out: Path) -> None:
        """Measure the model in `out` on held-out inputs and write its card."""
