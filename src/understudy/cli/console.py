"""Where the verbs print, and how they say what went wrong."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from understudy.errors import UnderstudyError

P = ParamSpec("P")
R = TypeVar("R")

out = Console()
err = Console(stderr=True)

WRONG_USE = 2
FAILED = 1


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Say a wrong use in one sentence with exit code 2; let everything else fail loudly with 1."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        quiet_libraries()
        try:
            return function(*args, **kwargs)
        except UnderstudyError as problem:
            err.print(f"[bold red]error:[/] {_plain(str(problem))}", highlight=False, soft_wrap=True)
            raise typer.Exit(WRONG_USE) from problem
        except KeyboardInterrupt:
            err.print("stopped", highlight=False)
            raise typer.Exit(130) from None

    return run


@contextmanager
def progress(label: str) -> Iterator[Callable[[float, int], None]]:
    """A progress bar with the rate and the time left, as the callback that long calls take."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=int(done), total=total)


def quiet_libraries() -> None:
    """Keep the libraries' own bars and notes out of our output; warnings of ours still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for library in ("transformers", "huggingface_hub", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
