"""The inputs of a router: to train on, to choose the epoch by, and to judge it by, which never touch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs

# The paper's counts.
TRAINING, VALIDATION, TEST = 4096, 64, 448


@dataclass(frozen=True)
class Splits:
    """Three lists of inputs, none of which is in two."""

    training: Inputs
    validation: Inputs
    test: Inputs

    def __post_init__(self) -> None:
        apart(self.training, self.validation, "training", "validation")
        apart(self.training, self.test, "training", "test")
        apart(self.validation, self.test, "validation", "test")


def apart(one: Inputs, other: Inputs, first: str, second: str) -> None:
    """Refuse lists of inputs that share some."""
    both = set(one.ids) & set(other.ids)
    if both:
        raise UnderstudyError(
            f"{len(both)} inputs are in both the {first} and the {second} inputs, such as {min(both)!r}: what a router "
            "is judged by, it must not have seen."
        )


def split(inputs: Inputs, *, test: int | None = None, validation: int | None = None) -> Splits:
    """Cut inputs into three: for the test, for validation, and the rest for training.

    A hash of its id decides where an input goes, so that a folder sorted by classes is mixed. By default a tenth each
    for test and validation, and at most the paper's 448 and 64.

    >>> from understudy.inputs.digits import digits
    >>> parts = split(digits(100))
    >>> len(parts.training), len(parts.validation), len(parts.test)
    (80, 10, 10)
    """
    tenth = len(inputs) // 10
    last, middle = (
        min(tenth, most) if asked is None else asked for asked, most in ((test, TEST), (validation, VALIDATION))
    )
    if last < 1 or middle < 1 or last + middle >= len(inputs):
        raise UnderstudyError(
            f"{len(inputs)} inputs cannot be cut into {last} for the test, {middle} for validation and at least one "
            "for training: give more inputs."
        )
    mixed = sorted(range(len(inputs)), key=lambda index: hashlib.sha256(inputs.ids[index].encode()).digest())
    return Splits(
        training=inputs.take(mixed[last + middle :]),
        validation=inputs.take(mixed[last : last + middle]),
        test=inputs.take(mixed[:last]),
    )


def digits_splits(training: int = TRAINING, *, validation: int = VALIDATION, test: int = TEST, seed: int = 0) -> Splits:
    """The splits of the bundled digits models; what is held out from the router, the model has never seen either.

    There are 1,198 digits to train on: each is used several times, moved and turned as in the model's own training.
    """
    from understudy.inputs.digits import digits

    held_out = digits(validation + test)
    return Splits(
        training=moved_digits(training, seed=seed),
        validation=held_out.take(range(validation)),
        test=held_out.take(range(validation, validation + test)),
    )


def moved_digits(count: int, *, seed: int = 0) -> Inputs:
    """Training digits, each moved at random; its place in the list alone decides how."""
    from understudy.inputs.digits import training_digits
    from understudy.recipes.digits import DIGITS
    from understudy.recipes.vit import moved

    originals = training_digits()
    by = (DIGITS.shift, DIGITS.rotation, DIGITS.stretch)

    def load(indices: Sequence[int]) -> Batch:
        batch = originals.batch([index % len(originals) for index in indices])
        chances = [torch.Generator().manual_seed(seed * 1_000_003 + index) for index in indices]
        pixels = [moved(one[None], *by, chance) for one, chance in zip(batch["pixel_values"], chances, strict=True)]
        return {**batch, "pixel_values": torch.cat(pixels)}

    ids = tuple(f"{originals.ids[index % len(originals)]}, moved {index // len(originals)}" for index in range(count))
    return Inputs(ids, load, {**originals.about, "moved": f"seed {seed}"})
