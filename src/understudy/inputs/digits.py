"""Handwritten digits, the images that every machine with scikit-learn has."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs

TOTAL = 1797  # images in scikit-learn's `load_digits`
FOLDS = (
    3  # every third image is held out; 3 has no factor in common with the ten classes that the data set cycles through
)

# The data set is ordered by writer, so a small sample must not be its beginning. Steps of 505 spread every prefix
# over the writers and the classes (of all strides this one does it best), and visit every held-out digit, since
# their count, 599, is prime.
STRIDE = 505


def digits(count: int | None = None) -> Inputs:
    """Held-out digits, which the bundled models have never seen.

    >>> inputs = digits(32)
    >>> inputs.batch([0])["pixel_values"].shape
    torch.Size([1, 1, 8, 8])

    The digits are spread over the writers, and fewer digits are always the first of more.
    """
    indices = held_out()
    count = len(indices) if count is None else count
    if not isinstance(count, int) or not 1 <= count <= len(indices):
        raise UnderstudyError(f"{count} held-out digits were asked for; there are 1 to {len(indices)}.")
    return _inputs(indices[:count], "held out")


def training_digits() -> Inputs:
    """The digits that the bundled models are trained on."""
    return _inputs([index for index in range(TOTAL) if index % FOLDS], "training")


def held_out() -> list[int]:
    """The held-out digits' indices in the data set, in the order in which they are handed out."""
    indices = list(range(0, TOTAL, FOLDS))
    return [indices[step * STRIDE % len(indices)] for step in range(len(indices))]


def _inputs(indices: Sequence[int], split: str) -> Inputs:
    def load(chosen: Sequence[int]) -> Batch:
        pixels, labels = _data()
        index = torch.tensor([indices[place] for place in chosen], dtype=torch.long)
        return {"pixel_values": pixels[index], "labels": labels[index]}

    ids = tuple(f"digit-{index:04d}" for index in indices)
    return Inputs(ids, load, {"kind": "digits", "source": "sklearn.datasets.load_digits", "split": split})


@functools.cache
def _data() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32) / 8 - 1  # 0..16 -> [-1, 1]
    assert len(pixels) == TOTAL
    return pixels[:, None], torch.tensor(data.target, dtype=torch.long)  # [digits, 1, 8, 8]
