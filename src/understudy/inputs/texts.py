"""Texts as token ids, plain or with some tokens masked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs

Source = str | Path | Sequence[str]


def texts(
    source: Source, model: nn.Module, *, length: int = 128, count: int | None = None, tokenizer: Any | None = None
) -> Inputs:
    """Texts, each cut to its first `length` tokens.

    >>> import understudy as us
    >>> us.texts(["import os", "def main():"], us.load("stdlib")).ids
    ('0', '1')

    source: a folder (each .txt file is a text), a file (each line is a text), or a list of strings.
    tokenizer: by default the one that belongs to the model's name.
    """
    tokenizer = tokenizer or _tokenizer(model)
    named = _named(source, count)
    tokens = {name: _tokens(tokenizer, name, text, length) for name, text in named}
    return _inputs(tokenizer, tokens, {}, {"kind": "texts", "length": length})


def masked_texts(
    source: Source,
    model: nn.Module,
    *,
    masks: int = 8,
    seed: int = 0,
    length: int = 128,
    count: int | None = None,
    tokenizer: Any | None = None,
) -> Inputs:
    """Texts with `masks` tokens of each masked, the same ones for the same text and seed.

    >>> import understudy as us
    >>> inputs = us.masked_texts("sentences.txt", model, masks=8)  # doctest: +SKIP

    Special tokens are never masked; a text with fewer tokens has all of its others masked.
    """
    tokenizer = tokenizer or _tokenizer(model)
    if tokenizer.mask_token_id is None:
        raise UnderstudyError(
            f"{type(tokenizer).__name__} has no mask token: masked texts need the tokenizer of a masked-language model."
        )
    if masks < 1:
        raise UnderstudyError(f"masks must be at least 1, but {masks} was given.")
    tokens, chosen = {}, {}
    for name, text in _named(source, count):
        ids = _tokens(tokenizer, name, text, length)
        special = tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
        places = [place for place, is_special in enumerate(special) if not is_special]
        if not places:
            raise UnderstudyError(f"Text {name!r} has no token that can be masked.")
        digest = hashlib.sha256(f"{seed} {text}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        order = torch.randperm(len(places), generator=generator)[:masks].tolist()
        chosen[name] = {places[index] for index in order}
        tokens[name] = [tokenizer.mask_token_id if i in chosen[name] else token for i, token in enumerate(ids)]
    about: dict[str, str | int] = {"kind": "masked_texts", "masks": masks, "seed": seed, "length": length}
    return _inputs(tokenizer, tokens, chosen, about)


def _inputs(
    tokenizer: Any, tokens: dict[str, list[int]], masked: dict[str, set[int]], about: dict[str, str | int]
) -> Inputs:
    names = tuple(tokens)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def load(indices: Sequence[int]) -> Batch:
        rows = [tokens[names[index]] for index in indices]
        longest = max(map(len, rows))

        def padded(values: list[list[int]], filler: int) -> Tensor:  # on the right
            return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

        batch = {
            "input_ids": padded(rows, padding),
            "attention_mask": padded([[1] * len(row) for row in rows], 0),
        }
        if masked:
            places = [masked[names[index]] for index in indices]
            batch["positions"] = torch.tensor([[i in row for i in range(longest)] for row in places])
        return batch

    return Inputs(names, load, about)


def _named(source: Source, count: int | None) -> list[tuple[str, str]]:
    found = list(_read(source))
    if not found:
        raise UnderstudyError(f"There are no texts in {source}: a folder needs .txt files, a file lines.")
    for name, text in found:
        if not text.strip():
            raise UnderstudyError(f"Text {name!r} is empty.")
    if count is not None and not 1 <= count <= len(found):
        raise UnderstudyError(f"{count} texts were asked for; there are {len(found)}: ask for 1 to {len(found)}.")
    return found[:count]


def _read(source: Source) -> Iterator[tuple[str, str]]:
    if not isinstance(source, str | Path):
        yield from ((str(index), text) for index, text in enumerate(source))
        return
    path = Path(source)
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            yield file.relative_to(path).as_posix(), file.read_text(encoding="utf-8")
    elif path.is_file():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                yield f"{path.name}:{number}", line
    else:
        raise UnderstudyError(
            f"{path} is not there: give a folder of .txt files, a file of lines or a list of strings."
        )


def _tokens(tokenizer: Any, name: str, text: str, length: int) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=length)["input_ids"]
    if not ids:
        raise UnderstudyError(f"Text {name!r} has no tokens.")
    return ids


def _tokenizer(model: nn.Module) -> Any:
    from transformers import AutoTokenizer

    from understudy import bundled

    body = anatomy(model)
    if not body.reads_text:
        raise UnderstudyError(f"{body.name} reads images, not text: give images(...).")
    name = str(getattr(body.model, "name_or_path", ""))
    where = str(bundled.folder(name)) if name in bundled.NAMES else name
    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError, ImportError, KeyError) as problem:
        raise UnderstudyError(
            f"No tokenizer belongs to {name or type(model).__name__}: pass one with tokenizer=..."
        ) from problem
