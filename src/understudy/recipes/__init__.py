"""Recipes: how the bundled models were trained, and how to train them again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError
from understudy.recipes.digits import DIGITS, DIGITS_12
from understudy.recipes.recipe import Progress, Recipe
from understudy.recipes.stdlib import STDLIB

__all__ = ["RECIPES", "Progress", "Recipe", "train"]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (DIGITS, DIGITS_12, STDLIB)}


def train(
    recipe: str | Recipe, out: str | Path, *, seed: int = 0, progress: Progress | None = None, **arguments: Any
) -> Path:
    """Train a model by a recipe into a folder that `from_pretrained` reads, with its card.

    >>> train("digits", "digits-again", seed=1)  # doctest: +SKIP
    PosixPath('digits-again')

    `recipe` is one of `RECIPES`, by name, or one of your own: `dataclasses.replace(RECIPES["digits"], epochs=1)`.
    Further `arguments` are those of `transformers.TrainingArguments` and win over the recipe's:
    `save_strategy="epoch"` keeps checkpoints in `out/checkpoints`, `use_cpu=True` leaves the GPU alone.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise UnderstudyError(f"There is no recipe {recipe!r}; the recipes are {', '.join(RECIPES)}.")
        recipe = RECIPES[recipe]
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UnderstudyError(f"{folder} is a file; give a folder for the model of recipe {recipe.name!r}.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if recipe.train(folder, seed=seed, progress=progress, **arguments):
            recipe.describe(folder)
    except BaseException:
        for empty in (folder / "checkpoints", folder):  # what an early end leaves, if it left nothing in it
            with suppress(OSError):
                empty.rmdir()
        raise
    return folder
