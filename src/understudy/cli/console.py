"""Where the verbs print, and how they say what went wrong."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from understudy.errors import UnderstudyError, Unfinished

P = ParamSpec("P")
R = TypeVar("R")

out = Console()
err = Console(stderr=True)

_EVERY = 60.0  # seconds between lines where there is no bar

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Say a wrong use in one sentence with exit code 2, failed work with 1; let everything else fail loudly with 1."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        quiet_libraries()
        try:
            with _stoppable():
                return function(*args, **kwargs)
        except UnderstudyError as problem:
            err.print(f"[bold red]error:[/] {_plain(str(problem))}", highlight=False, soft_wrap=True)
            raise typer.Exit(FAILED if isinstance(problem, Unfinished) else WRONG_USE) from problem
        except KeyboardInterrupt:
            err.print("stopped", highlight=False)
            raise typer.Exit(INTERRUPTED) from None

    return run


@contextmanager
def progress(label: str) -> Iterator[Callable[[float, int], None]]:
    """A progress bar with the rate and the time left, as the callback that long calls take."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    if not err.is_terminal:  # a log wants lines, and few of them
        yield _lines(label)
        return
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=None)
        begun = False

        def report(done: float, total: int) -> None:
            nonlocal begun
            if begun:
                bar.update(task, completed=done, total=total)
            else:  # what an earlier process did says nothing about the rate
                bar.reset(task, completed=int(done), total=total)
            begun = True

        yield report


@contextmanager
def bars() -> Iterator[Callable[[str], Callable[[float, int], None]]]:
    """One bar after the other, each with the name of its step."""
    with ExitStack() as stack:

        def bar(step: str) -> Callable[[float, int], None]:
            stack.close()
            return stack.enter_context(progress(step))

        yield bar


def _lines(label: str) -> Callable[[float, int], None]:
    """A line every minute: how much is done, at which rate, and the time that is left."""
    first: list[float] = []
    said = began = time.monotonic()

    def report(done: float, total: int) -> None:
        nonlocal said
        first[:] = first or [done]
        now = time.monotonic()
        if now - said < _EVERY or done <= first[0]:
            return
        said = now
        rate = (done - first[0]) / (now - began)
        left = (total - done) / rate / 60
        err.print(f"{label}: {int(done)}/{total}, {60 * rate:.1f}/min, {left:.0f} min left", highlight=False)

    return report


class _Rate(ProgressColumn):
    """How many are done in a second, or in a minute."""

    def render(self, task: Task) -> Text:
        """The rate of a task."""
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{60 * speed:.1f}/min", style="progress.data.speed")


@contextmanager
def _stoppable() -> Iterator[None]:
    """A request to end, as schedulers send it, is an interrupt: what is done is kept, and said."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def quiet_libraries() -> None:
    """Keep the libraries' own bars and notes out of our output; warnings of ours still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for library in ("transformers", "huggingface_hub", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
