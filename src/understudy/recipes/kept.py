"""A model that a study needs: trained unless it is there, and gone on with where its training was interrupted."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from understudy.recipes.recipe import Progress
from understudy.recipes.record import FILE, Record

# A killed training loses at most this share of its steps.
SAVED_EVERY = 0.1


class Trainable(Protocol):
    """A recipe that can say what decides its weights."""

    @property
    def name(self) -> str:
        """The name of the model that it makes."""

    def told(self) -> Mapping[str, Any]:
        """What decides the weights, apart from the seed."""

    def train(
        self, out: Path, *, seed: int, progress: Progress | None, callbacks: Sequence[Any] = (), **arguments: Any
    ) -> bool:
        """Train into `out`."""


def place(recipe: Trainable, seed: int) -> str:
    """The folder name of a model: other settings or another seed have another one."""
    text = json.dumps(dict(recipe.told()), sort_keys=True, default=str)
    return f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}-seed{seed}"


def kept(
    recipe: Trainable,
    folder: Path,
    *,
    seed: int,
    progress: Progress | None = None,
    callbacks: Sequence[Any] = (),
    checkpoints: bool = False,
    **arguments: Any,
) -> Path:
    """The model of a recipe and a seed below `folder`, trained if it is not there.

    A training that was interrupted goes on from its last complete checkpoint. Checkpoints are removed when it is
    done, unless they are wanted.
    """
    out = folder / place(recipe, seed)
    if is_trained(out):
        return out
    out.mkdir(parents=True, exist_ok=True)
    saving = {"save_strategy": "steps", "save_steps": SAVED_EVERY, "save_total_limit": None if checkpoints else 1}
    recipe.train(
        out,
        seed=seed,
        progress=progress,
        callbacks=callbacks,
        resume_from_checkpoint=last_checkpoint(out / "checkpoints"),
        **{**saving, **arguments},
    )
    if not checkpoints:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return out


def is_trained(out: Path) -> bool:
    """Whether a training has ended here: its record is what it writes last."""
    try:
        Record.load(out)
    except (ValueError, TypeError):  # an empty or half a file, and no record: UnderstudyError is a ValueError
        return False
    return (out / FILE).is_file()


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a Trainer: one whose state, which it writes last, can be read."""
    complete = {}
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        try:
            complete[int(json.loads(state.read_text(encoding="utf-8"))["global_step"])] = state.parent
        except (ValueError, KeyError):
            continue
    return str(complete[max(complete)]) if complete else None
