"""What a model is measured on: named inputs that yield batch dicts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from understudy.errors import UnderstudyError

Batch = dict[str, Tensor]

# What happens to an input that cannot be read: the whole is refused, or it is left out and named.
Bad = Literal["refuse", "skip"]

# Keys that belong to the measurement; the model's forward never sees them.
ASIDE = ("positions", "labels")


@dataclass(frozen=True)
class Inputs:
    """Named inputs, loaded a few at a time.

    >>> inputs = Inputs.of({"input_ids": torch.zeros(2, 5, dtype=torch.long)})
    >>> len(inputs), inputs.ids, inputs.batch([1])["input_ids"].shape
    (2, ('0', '1'), torch.Size([1, 5]))

    `load` takes indices and returns the batch dict of these inputs: what the model's
    forward takes (`pixel_values`, or `input_ids` with `attention_mask`) and optionally
    `positions` (bool, `[inputs, tokens]`: the tokens whose distributions are the outcome)
    and `labels`. `about` says where the inputs come from and is stored with every result. `content` gives the bytes
    that an input is told by, where that is cheaper than loading it. `skipped` names what was left out, and why.
    """

    ids: tuple[str, ...]
    load: Callable[[Sequence[int]], Batch]
    about: Mapping[str, str | int] = field(default_factory=dict)
    content: Callable[[int], bytes] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ids:
            raise UnderstudyError("There are no inputs: give at least one.")
        if len(set(self.ids)) != len(self.ids):
            twice = next(name for name in self.ids if self.ids.count(name) > 1)
            raise UnderstudyError(f"Input ids must be unique, but {twice!r} occurs more than once.")

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], *, ids: Sequence[str] | None = None) -> Inputs:
        """Inputs from a batch dict held in memory."""
        for key, value in batch.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise UnderstudyError(
                    f"A batch dict needs tensors with one common first dimension, but {key} is {_described(value)}."
                )
        sizes = {key: len(value) for key, value in batch.items()}
        if not sizes or len(set(sizes.values())) != 1:
            raise UnderstudyError(f"A batch dict needs tensors with one common first dimension, but has {sizes}.")
        count = next(iter(sizes.values()))
        names = tuple(str(index) for index in range(count)) if ids is None else tuple(ids)
        if len(names) != count:
            raise UnderstudyError(f"{len(names)} ids were given for {count} inputs.")

        def load(indices: Sequence[int]) -> Batch:
            index = torch.as_tensor(list(indices))
            return {key: value[index.to(value.device)] for key, value in batch.items()}

        return cls(names, load, {"kind": "batch"})

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        shown = ", ".join(self.ids[:3]) + (", ..." if len(self.ids) > 3 else "")
        return f"Inputs({len(self.ids)} of {self.about.get('kind', 'unknown')}: {shown})"

    def batch(self, indices: Sequence[int]) -> Batch:
        """The batch dict of the inputs at these indices."""
        return self.load(indices)

    def take(self, indices: Sequence[int]) -> Inputs:
        """The inputs at these indices, in this order."""
        chosen = list(indices)

        def load(inner: Sequence[int]) -> Batch:
            return self.load([chosen[index] for index in inner])

        def content(index: int) -> bytes:
            assert self.content is not None
            return self.content(chosen[index])

        names = tuple(self.ids[index] for index in chosen)
        return Inputs(names, load, self.about, content if self.content is not None else None, self.skipped)

    def fingerprint(self) -> str:
        """A hash of the content of every input, independent of how they are batched."""
        digest = hashlib.sha256()
        for index, name in enumerate(self.ids):
            digest.update(name.encode())
            if self.content is not None:
                digest.update(self.content(index))
                continue
            for key, value in sorted(self.batch([index]).items()):
                digest.update(f"{key}{tuple(value.shape)}{value.dtype}".encode())
                digest.update(value.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return "a tensor" if value.ndim else "a single number"
    return f"a {type(value).__name__}"


def as_inputs(inputs: Inputs | Mapping[str, Tensor]) -> Inputs:
    """Inputs as they are, or a bare batch dict made into inputs."""
    if not isinstance(inputs, Inputs | Mapping):
        raise UnderstudyError(
            f"Inputs are made by images(...), texts(...), ..., or are a batch dict; {_described(inputs)} was given."
        )
    return inputs if isinstance(inputs, Inputs) else Inputs.of(inputs)


def checked_bad(bad: str) -> Bad:
    """The word, if it is one of the two."""
    if bad not in ("refuse", "skip"):
        raise UnderstudyError(f"bad={bad!r} is not possible: say 'refuse' or 'skip'.")
    return bad  # type: ignore[return-value]
