"""understudy train: make a bundled model again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.console import out, progress, verb

EXAMPLES = """
**Examples**

`understudy train digits --out my-digits`

`understudy train stdlib --out my-stdlib --seed 1`
"""


@verb
def train(
    recipe: Annotated[str, typer.Argument(help="digits, digits-12 or stdlib.")],
    output: Annotated[
        Path | None, typer.Option("--out", help="The folder to write; by default the recipe's name.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of weights, order and augmentation.")] = 0,
) -> None:
    """Train a bundled model again by its recipe, with its card."""
    from understudy.recipes import train as run_train

    with progress(f"training {recipe}") as report:
        folder = run_train(recipe, output or Path(recipe), seed=seed, progress=report)
    out.print(f"wrote {folder}; its card is {folder / 'README.md'}", highlight=False, soft_wrap=True)
