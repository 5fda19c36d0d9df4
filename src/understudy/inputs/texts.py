"""Texts as token ids, plain or with some tokens masked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Bad, Batch, Inputs, checked_bad

Source = str | Path | Sequence[str]


def texts(
    source: Source,
    model: nn.Module,
    *,
    length: int = 128,
    count: int | None = None,
    tokenizer: Any | None = None,
    bad: Bad = "refuse",
) -> Inputs:
    """Texts, each cut to its first `length` tokens.

    >>> import understudy as us
    >>> us.texts(["import os", "def main():"], us.load("stdlib")).ids
    ('0', '1')

    source: a folder (each .txt file is a text), a file (each line is a text), or a list of strings.
    tokenizer: by default the one that belongs to the model's name.
    bad: whether a text that is empty, has no tokens or is not UTF-8 is refused, or skipped and named in
        `Inputs.skipped`.
    """
    tokenizer = tokenizer or _tokenizer(model)
    _checked_length(length)

    def tokens(name: str, text: str) -> _Text:
        return _Text(_tokens(tokenizer, name, text, length))

    found, skipped = _gathered(source, count, checked_bad(bad), tokens)
    return _inputs(tokenizer, found, {"kind": "texts", "length": length}, skipped)


def masked_texts(
    source: Source,
    model: nn.Module,
    *,
    masks: int = 8,
    seed: int = 0,
    length: int = 128,
    count: int | None = None,
    tokenizer: Any | None = None,
    bad: Bad = "refuse",
) -> Inputs:
    """Texts with `masks` tokens of each masked, the same ones for the same text and seed.

    >>> import understudy as us
    >>> inputs = us.masked_texts("sentences.txt", model, masks=8)  # doctest: +SKIP

    Special tokens are never masked; a text with fewer tokens has all of its others masked. The rest is as in `texts`.
    """
    tokenizer = tokenizer or _tokenizer(model)
    if tokenizer.mask_token_id is None:
        raise UnderstudyError(
            f"{type(tokenizer).__name__} has no mask token: masked texts need the tokenizer of a masked-language model."
        )
    if masks < 1:
        raise UnderstudyError(f"masks must be at least 1, but {masks} was given.")
    _checked_length(length)

    def masked(name: str, text: str) -> _Text:
        ids = _tokens(tokenizer, name, text, length)
        special = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        places = np.flatnonzero(np.asarray(special) == 0)
        if not len(places):
            raise UnderstudyError(f"Text {name!r} has no token that can be masked.")
        digest = hashlib.sha256(f"{seed} {text}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        chosen = places[torch.randperm(len(places), generator=generator)[:masks].numpy()]
        original = ids[chosen]
        ids[chosen] = tokenizer.mask_token_id
        return _Text(ids, chosen, original)

    found, skipped = _gathered(source, count, checked_bad(bad), masked)
    about: dict[str, str | int] = {"kind": "masked_texts", "masks": masks, "seed": seed, "length": length}
    return _inputs(tokenizer, found, about, skipped)


@dataclass(frozen=True)
class _Text:
    tokens: np.ndarray
    masked: np.ndarray | None = None  # the places that are
    original: np.ndarray | None = None  # the tokens that were there


def _inputs(tokenizer: Any, texts: dict[str, _Text], about: dict[str, str | int], skipped: dict[str, str]) -> Inputs:
    names = tuple(texts)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def load(indices: Sequence[int]) -> Batch:
        rows = [texts[names[index]] for index in indices]
        longest = max(len(row.tokens) for row in rows)
        ids = np.full((len(rows), longest), padding, dtype=np.int64)  # padded on the right
        real, labels = np.zeros_like(ids), np.full_like(ids, -100)  # -100: what no loss asks for
        for index, row in enumerate(rows):
            ids[index, : len(row.tokens)], real[index, : len(row.tokens)] = row.tokens, 1
            if row.masked is not None and row.original is not None:
                labels[index, row.masked] = row.original
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real)}
        if (labels >= 0).any():
            batch |= {"positions": torch.from_numpy(labels >= 0), "labels": torch.from_numpy(labels)}
        return batch

    return Inputs(names, load, about | ({"skipped": len(skipped)} if skipped else {}), skipped=skipped)


def _gathered(
    source: Source, count: int | None, bad: Bad, prepare: Callable[[str, str], _Text]
) -> tuple[dict[str, _Text], dict[str, str]]:
    """The first `count` texts that can be prepared, by name, and what is wrong with those before them that cannot."""
    there = list(_read(source))
    if not there:
        raise UnderstudyError(f"There are no texts in {source}: a folder needs .txt files, a file lines.")
    if count is not None and not 1 <= count <= len(there):
        raise UnderstudyError(f"{count} texts were asked for; there are {len(there)}: ask for 1 to {len(there)}.")
    found: dict[str, _Text] = {}
    skipped: dict[str, str] = {}
    for name, content in there:
        if len(found) == count:
            break
        try:
            text = _decoded(name, content)
            found[name] = prepare(name, text)
        except UnderstudyError as problem:
            if bad == "refuse":
                raise UnderstudyError(
                    f"{problem} Mend or remove it, or leave such texts out with bad='skip' (--skip-bad)."
                ) from problem
            skipped[name] = str(problem)
    if not found:
        raise UnderstudyError(f"None of the {len(there)} texts in {source} can be used. {next(iter(skipped.values()))}")
    return found, skipped


def _read(source: Source) -> Iterator[tuple[str, str | bytes | Path]]:
    """Names, and what holds each text."""
    if not isinstance(source, str | Path):
        yield from ((str(index), text) for index, text in enumerate(source))
        return
    path = Path(source)
    if path.is_dir():
        yield from ((file.relative_to(path).as_posix(), file) for file in sorted(path.rglob("*.txt")))
    elif path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                yield f"{path.name}:{number}", line
    else:
        raise UnderstudyError(
            f"{path} is not there: give a folder of .txt files, a file of lines or a list of strings."
        )


def _decoded(name: str, content: str | bytes | Path) -> str:
    raw = content.read_bytes() if isinstance(content, Path) else content
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    except UnicodeDecodeError as problem:
        raise UnderstudyError(f"Text {name!r} is not UTF-8 ({problem.reason} at byte {problem.start}).") from problem
    if not text.strip():
        raise UnderstudyError(f"Text {name!r} is empty.")
    return text


def _tokens(tokenizer: Any, name: str, text: str, length: int) -> np.ndarray:
    ids = np.asarray(tokenizer(text, truncation=True, max_length=length)["input_ids"], dtype=np.int32)
    if not len(ids):
        raise UnderstudyError(f"Text {name!r} has no tokens.")
    return ids


def _checked_length(length: int) -> None:
    if length < 1:
        raise UnderstudyError(f"length must be at least 1, but {length} was given.")


def _tokenizer(model: nn.Module) -> Any:
    from transformers import AutoTokenizer

    from understudy import bundled

    body = anatomy(model)
    if not body.reads_text:
        raise UnderstudyError(f"{body.name} reads images, not text: give images(...).")
    name = str(getattr(body.model, "name_or_path", ""))
    where = str(bundled.folder(name)) if name in bundled.NAMES else name
    try:
        revision = getattr(getattr(body.model, "config", None), "_commit_hash", None)
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as problem:
        raise UnderstudyError(
            f"No tokenizer belongs to {name or type(model).__name__}: pass one with tokenizer=..."
        ) from problem
