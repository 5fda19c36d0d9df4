"""The source of the Python standard library, the corpus that every machine with Python has."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from understudy import bundled
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs

# Not the standard library, tests, a demo application, and tables that a script has generated.
LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idlelib"),
    *("encodings", "pydoc_data"),
}
LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")  # the build's own settings: they differ from machine to machine


def stdlib(count: int = 32, *, length: int = 128) -> Inputs:
    """Held-out contexts from the Python standard library's source, which the bundled model has never seen.

    >>> inputs = stdlib(2, length=16)
    >>> inputs.batch([0])["input_ids"].shape
    torch.Size([1, 16])

    Each file gives one context before any gives a second. A file gives first the one in its middle,
    since files begin alike. Fewer contexts are always the first of more.
    """
    limit = json.loads((bundled.folder("stdlib") / "config.json").read_text())["n_positions"]
    if not 2 <= length <= limit:
        raise UnderstudyError(f"Contexts of {length} tokens were asked for; the model `stdlib` reads 2 to {limit}.")
    return contexts(_tokenizer(), count, length)


def contexts(tokenizer: Any, count: int | None, length: int) -> Inputs:
    """Held-out contexts under any `tokenizers.Tokenizer`; all that there are if `count` is None."""
    files = held_out_files()
    streams = dict(zip(files, encode(tokenizer, files), strict=True))
    places = _places({name: len(stream) // length for name, stream in streams.items()})
    count = len(places) if count is None else count
    if not 1 <= count <= len(places):
        raise UnderstudyError(
            f"{count} contexts of {length} tokens were asked for; the {len(files)} held-out files of the standard "
            f"library of Python {platform.python_version()} give 1 to {len(places)}. Ask for fewer or for shorter ones."
        )
    chosen = [(name, window * length) for name, window in places[:count]]

    def load(indices: Sequence[int]) -> Batch:
        rows = [streams[name][start : start + length] for name, start in (chosen[index] for index in indices)]
        tokens = torch.tensor(rows, dtype=torch.long)  # [contexts, length]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    about: dict[str, str | int] = {"kind": "stdlib", "python": platform.python_version(), "length": length}
    return Inputs(tuple(f"{name}:{start}" for name, start in chosen), load, about)


def held_out_files() -> list[str]:
    """The files that no recipe trains on, as paths below the standard library's folder, ordered by hash."""
    return sorted((name for name in _files() if _hash(name) % 10 == 0), key=_hash)


def training_files() -> list[str]:
    """The files that the recipe trains on, as paths below the standard library's folder."""
    return [name for name in _files() if _hash(name) % 10]


def read(names: Sequence[str]) -> list[str]:
    """The text of these files of the standard library."""
    return [(_folder() / name).read_text(encoding="utf-8") for name in names]


def encode(tokenizer: Any, names: Sequence[str]) -> list[list[int]]:
    """The tokens of these files of the standard library, one list a file."""
    return [encoding.ids for encoding in tokenizer.encode_batch(read(names), add_special_tokens=False)]


def _hash(name: str) -> int:
    # A hash of the path, so that a file stays on its side of the split in every version of Python.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _places(windows: dict[str, int]) -> list[tuple[str, int]]:
    """Every file's windows in rounds: its middle window, then the ones after it, around to the beginning."""
    rounds = range(max(windows.values(), default=0))
    return [(name, (n // 2 + step) % n) for step in rounds for name, n in windows.items() if step < n]


@functools.cache
def _files() -> tuple[str, ...]:
    folder = _folder()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    kept = tuple(name for name in names if _wanted(name) and _is_utf8(folder / name))
    if not kept:
        raise UnderstudyError(
            f"The source of the standard library is not on this machine: {folder} holds no .py files. "
            "Use a Python that brings its source, or give your own texts."
        )
    return kept


def _wanted(name: str) -> bool:
    parts = name.split("/")
    return LEFT_OUT.isdisjoint(parts) and not any(part.startswith(LEFT_OUT_PREFIXES) for part in parts)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(bundled.folder("stdlib") / "tokenizer.json"))
