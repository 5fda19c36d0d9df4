"""Rows and their inputs: which rows belong to which input, and to which of its items."""

from __future__ import annotations

import torch
from torch import Tensor


def segments(owner: Tensor) -> list[tuple[int, range]]:
    """The runs of equal owners: (input, its rows)."""
    values, counts = torch.unique_consecutive(owner, return_counts=True)
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [(i, range(a, b)) for i, a, b in zip(values.tolist(), starts, ends, strict=True)]


def expand(owner: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All items of each row, where input i has counts[i] items in a flat list: (row, item) for each."""
    count = torch.tensor(counts)
    first = count.cumsum(0) - count
    many = count[owner]
    row = torch.arange(len(owner)).repeat_interleave(many)
    within = torch.arange(len(row)) - (many.cumsum(0) - many)[row]
    return row, first[owner][row] + within
