"""Work that several processes divide among themselves, by a folder that they share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from understudy.errors import UnderstudyError

T = TypeVar("T")

_WAIT = 2.0  # seconds between looks at what other processes work on


def divided(work: Mapping[str, Callable[[], T]], folder: Path) -> dict[str, T]:
    """Do every piece of work, by name; each process takes one that nobody works on.

    A piece keeps its result in files and returns it from there when it is done already, so the same command on
    several machines divides a study among them, and all of them have all results.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnderstudyError(
            "A study divides its models among processes that share a folder, not among those of torchrun: start the "
            "same command as often as you like, without torchrun."
        )
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, T] = {}
    while len(found) < len(work):
        before = len(found)
        for name, piece in work.items():
            if name not in found:
                with _ours(folder / f"{name}.lock") as ours:
                    if ours:
                        found[name] = piece()
        if len(found) == before:
            time.sleep(_WAIT)
    return {name: found[name] for name in work}


@contextmanager
def _ours(path: Path) -> Iterator[bool]:
    """Whether nobody else works on it; then it is ours until the end, also if that is a SIGKILL."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
