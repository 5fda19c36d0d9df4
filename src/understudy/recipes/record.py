"""What a training run was: kept beside the weights, so that the card can be written again without training."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError

FILE = "training.json"


@dataclass(frozen=True)
class Record:
    """One training run: its recipe, what was changed in it, and what it took."""

    recipe: Mapping[str, Any]  # the recipe's fields
    arguments: Mapping[str, Any]  # `transformers.TrainingArguments` that the user set over the recipe's
    seed: int
    steps: int
    examples: int  # seen, over all epochs and processes
    seconds: float
    versions: str

    def save(self, out: Path) -> None:
        """Write the record into the model's folder."""
        (out / FILE).write_text(json.dumps(asdict(self), indent=2, default=str) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, out: Path) -> Record:
        """The record in a model's folder."""
        path = out / FILE
        if not path.is_file():
            raise UnderstudyError(f"{out} holds no {FILE}: give a folder that a recipe has trained.")
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def versions() -> str:
    """The versions on which a run's numbers depend."""
    import torch
    import transformers

    return f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
