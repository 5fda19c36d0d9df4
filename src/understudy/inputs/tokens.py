"""A corpus as tokens of one tokenizer: files that many trainings share, read without loading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs
from understudy.inputs.corpus import Corpus

END = "<|endoftext|>"
# Enough text to find the words of; a corpus may be a thousand times larger.
TOKENIZER_BYTES = 200_000_000
# Beyond about four passes repeated text teaches ever less, and models of different size are starved differently.
PASSES = 4

_TOGETHER = 512  # documents that are encoded at once


@dataclass(frozen=True)
class Tokens:
    """The tokens of a corpus in a folder, and the tokenizer that made them."""

    folder: Path

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer, as `tokenizers` saves it."""
        return self.folder / "tokenizer.json"

    @cached_property
    def about(self) -> dict[str, Any]:
        """What they were made of."""
        found: dict[str, Any] = json.loads((self.folder / "tokens.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def end(self) -> int:
        """The token that ends a document."""
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(self.tokenizer_file)).token_to_id(END)
        assert found is not None
        return int(found)

    @cached_property
    def training(self) -> np.ndarray:
        """The tokens to train on, one document after the other."""
        return self._read("training")

    @cached_property
    def held_out(self) -> np.ndarray:
        """The tokens that are held out."""
        return self._read("held_out")

    def contexts(self, count: int, length: int) -> Inputs:
        """Held-out contexts, spread evenly over the held-out text."""
        windows = len(self.held_out) // length
        if not 1 <= count <= windows:
            raise UnderstudyError(
                f"{count} held-out contexts of {length} tokens were asked for; the corpus {self.about['corpus']} gives "
                f"{windows}. Ask for fewer or shorter ones, or give more text."
            )
        starts = [index * windows // count * length for index in range(count)]
        stream = self.held_out

        def load(indices: Sequence[int]) -> Batch:
            rows = np.stack([stream[starts[index] : starts[index] + length] for index in indices]).astype(np.int64)
            tokens = torch.from_numpy(rows)  # [contexts, length]
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

        about: dict[str, str | int] = {"kind": "corpus", "corpus": str(self.about["corpus"]), "length": length}
        return Inputs(tuple(f"token-{start}" for start in starts), load, about)

    def _read(self, part: str) -> np.ndarray:
        return np.memmap(self.folder / f"{part}.bin", dtype=self.about["dtype"], mode="r")


def tokenized(corpus: Corpus, folder: Path, *, vocabulary: int, tokens: int, held_out: int) -> Tokens:
    """The corpus as tokens, made in `folder` unless they are there.

    vocabulary: of the byte-level BPE tokenizer that is trained on the training documents.
    tokens: the budget of a training; a corpus that would have to be read more than `PASSES` times is too small.
    held_out: how many held-out tokens are needed, at most.
    """
    asked = {"corpus": corpus.name, "documents": corpus.fingerprint, "vocabulary": vocabulary, "tokens": tokens}
    asked["asked_held_out"] = held_out
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        made = Tokens(folder)
        if not (folder / "tokens.json").is_file():
            _make(corpus, folder, asked)
        elif {key: made.about.get(key) for key in asked} != asked:
            raise UnderstudyError(
                f"{folder} holds the tokens of another corpus or budget, or its documents have changed since: choose "
                "another folder, or remove it."
            )
    return made


def _make(corpus: Corpus, folder: Path, asked: dict[str, Any]) -> None:
    tokenizer = train_tokenizer(corpus.training(), asked["vocabulary"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    counts = {}
    for part, documents, most in (
        ("training", corpus.training(), asked["tokens"]),
        ("held_out", corpus.held_out(), asked["asked_held_out"]),
    ):
        counts[part] = _write(tokenizer, documents, folder / f"{part}.bin", dtype, most)
    if counts["training"] * PASSES < asked["tokens"]:
        raise UnderstudyError(
            f"The corpus {corpus.name} has {counts['training']:,} training tokens, but a budget of "
            f"{asked['tokens']:,} tokens needs at least {-(-asked['tokens'] // PASSES):,} ({PASSES} passes): give more "
            "text, or a smaller budget."
        )
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "training.bin", "held_out.bin"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    about = {**asked, **counts, "dtype": dtype.name, "size": size, "fingerprint": digest.hexdigest()}
    # Written last: without it the rest is made again.
    (folder / "tokens.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer of these documents."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _first_bytes(documents), vocab_size=vocabulary, special_tokens=[END], show_progress=False
    )
    return Tokenizer.from_str(tokenizer.to_str())


def _first_bytes(documents: Iterable[str]) -> Iterator[str]:
    seen = 0
    for text in documents:
        yield text
        seen += len(text)
        if seen > TOKENIZER_BYTES:
            return


def _write(tokenizer: Any, documents: Iterable[str], path: Path, dtype: np.dtype[Any], most: int) -> int:
    """Write the tokens of documents, each followed by the end token, until there are `most`; return how many."""
    end, count, left = tokenizer.token_to_id(END), 0, iter(documents)
    with path.open("wb") as file:
        while count < most and (some := list(islice(left, _TOGETHER))):
            for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
                tokens = np.asarray([*encoding.ids, end], dtype=dtype)[: most - count]
                file.write(tokens.tobytes())
                count += len(tokens)
    return count
