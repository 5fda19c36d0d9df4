"""A model opened behind a site, as `measure` opens it, so that its parts can be timed alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from understudy.anatomy import anatomy
from understudy.capture import capture
from understudy.outcome import Reads, reads, resolve
from understudy.resume import Suffix
from understudy.surgery import opened


@contextmanager
def suffix_of(
    model: nn.Module, batch: Mapping[str, Tensor], layer: int, outcome: str = "auto"
) -> Iterator[tuple[Suffix, Reads]]:
    """Everything after the site of a layer for a batch, and the tokens that its outcome reads."""
    body = anatomy(model)
    with opened(model):
        taken = capture(body, dict(batch), [layer])
        read = reads(body, taken, resolve(body, outcome), [str(i) for i in range(taken.count)])
        yield Suffix(body, taken, layer, read, dtype=torch.float32), read
