"""A corpus: documents to train on, and documents that are held out. They are read when they are asked for."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError
from understudy.inputs import stdlib

# One document in so many is held out.
FOLDS = 10


@dataclass(frozen=True)
class Corpus:
    """Documents in two parts that never mix; each call reads a part anew. fingerprint: tells it from a changed one."""

    name: str
    fingerprint: str
    training: Callable[[], Iterable[str]]
    held_out: Callable[[], Iterable[str]]


def corpus(source: str | Path = "stdlib") -> Corpus:
    """A corpus by its source.

    >>> documents = corpus("stdlib")
    >>> len(list(documents.held_out())) < len(list(documents.training()))
    True

    "stdlib": the source of the Python standard library, its held-out files held out.
    A folder: its .txt files, each a document. A file: its lines. A tenth of them, by a hash, is held out.
    "hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]": a data set of the hub, or of a local folder, streamed; every tenth document
    is held out. Without more, the split is "train" and the column "text".
    """
    text = str(source)
    if text == "stdlib":
        return Corpus(
            "stdlib",
            platform.python_version(),
            lambda: stdlib.read(stdlib.training_files()),
            lambda: stdlib.read(stdlib.held_out_files()),
        )
    if text.startswith("hub:"):
        rows = HubTexts.of(text)
        return Corpus(text, text, lambda: _part(rows, held_out=False), lambda: _part(rows, held_out=True))
    path = Path(source)
    if not path.exists():
        raise UnderstudyError(
            f"The corpus {text} is not there: give a folder of .txt files, a file of lines, 'stdlib', or "
            "'hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]'."
        )
    parts = [partial(_part_of, path, held_out=held_out) for held_out in (False, True)]
    return Corpus(path.name, _listing(path), *parts)


@dataclass(frozen=True)
class HubTexts:
    """The texts of a data set that the package datasets reads, one after the other."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"

    @classmethod
    def of(cls, text: str) -> HubTexts:
        """From "hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]"; an empty part is the default."""
        parts = text.removeprefix("hub:").split(":")
        if not parts[0] or len(parts) > 4:
            raise UnderstudyError(f"{text!r} is no data set: write hub:NAME[:CONFIG[:SPLIT[:COLUMN]]].")
        name, config, split, column = (*parts, *[""] * (4 - len(parts)))
        return cls(name, config or None, split or "train", column or "text")

    def __iter__(self) -> Iterator[str]:
        for row in self._rows():
            if self.column not in row:
                raise UnderstudyError(
                    f"The data set {self.name} has no column {self.column!r}: it has {', '.join(map(str, row))}."
                )
            if row[self.column]:
                yield str(row[self.column])

    def _rows(self) -> Iterable[Any]:
        try:
            import datasets
        except ImportError as problem:
            raise UnderstudyError(f'{self.name} needs the package datasets: pip install "understudy[datasets]"') from (
                problem
            )
        try:
            rows: Iterable[Any] = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except Exception as problem:  # no network, no such data set, no such split: the library has a class for each
            first = str(problem).strip().split("\n")[0]
            raise UnderstudyError(
                f"The data set {self.name} could not be opened: the hub could not be reached, or has no such data set, "
                f"configuration or split. Offline, give texts of your own. ({first})"
            ) from problem
        return rows


def _part(documents: Iterable[str], *, held_out: bool) -> Iterator[str]:
    return (text for index, text in enumerate(documents) if (index % FOLDS == 0) == held_out)


def _part_of(path: Path, *, held_out: bool) -> Iterator[str]:
    return _part(_files(path), held_out=held_out)


def _listing(path: Path) -> str:
    """A hash of what lies below a path: names, sizes and times."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    known = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
    text = "\n".join(f"{name} {about.st_size} {about.st_mtime_ns}" for name, about in known)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files(path: Path) -> Iterator[str]:
    """The documents below a path, in an order that mixes what stands together."""
    if path.is_dir():
        named = {file.relative_to(path).as_posix(): file for file in path.rglob("*.txt")}
        if len(named) < 2:
            raise UnderstudyError(
                f"The corpus {path} has {len(named)} .txt files: give at least two, since a tenth is held out."
            )
        for name in sorted(named, key=_hash):
            yield _decoded(named[name].read_bytes(), name)
        return
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    if len(lines) < 2:
        raise UnderstudyError(f"The corpus {path} has {len(lines)} lines: give two or more, since a tenth is held out.")
    for number in sorted(range(len(lines)), key=lambda at: _hash(str(at))):
        yield _decoded(lines[number], f"line {number + 1} of {path.name}")


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UnderstudyError(f"The document {name} is not UTF-8 ({problem.reason} at byte {problem.start}).") from (
            problem
        )


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
