"""What every analysis of the lens does: open a model for some layers, and walk over its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from understudy.inputs.batch import Inputs
from understudy.meter import Meter, Progress
from understudy.resume import BUDGET, Suffix
from understudy.search import Search
from understudy.worker import Captured, Job, Layers, Worker

Given = Inputs | Mapping[str, Tensor]


@contextmanager
def opened(
    model: nn.Module,
    inputs: Given,
    *,
    layers: Layers = "last",
    units: str = "heads",
    search: str | Search = "grid:31",
    outcome: str = "auto",
    threshold: float = 1e-5,
    budget: int = BUDGET,
) -> Iterator[Worker]:
    """A worker for an analysis in this process."""
    job = Job(
        open=lambda: (model, inputs),
        layers=layers,
        units=units,
        search=search,
        outcome=outcome,
        threshold=threshold,
        device=None,
        dtype=None,
        batch_size=None,
        budget=budget,
        shard=None,
    )
    with Worker(job) as worker:
        yield worker


def walk(worker: Worker, progress: Progress | None = None) -> Iterator[tuple[Captured, Suffix]]:
    """Every batch of inputs at every layer; the layers of a batch follow each other."""
    meter = Meter(progress, len(worker.inputs) * len(worker.protocol.layers))
    for captured in worker.captures(range(len(worker.inputs))):
        for suffix in worker.suffixes(captured):
            yield captured, suffix
            meter.close(captured.taken.count)


def gathered(parts: list[list[Any]]) -> np.ndarray:
    """What a walk found, one list of layers for each batch: `[input, layer, ...]`."""
    return np.concatenate([np.stack([np.asarray(value) for value in layers], axis=1) for layers in parts])


def targets(worker: Worker, captured: Captured, suffix: Suffix) -> Tensor:
    """The class of each distribution that a task loss asks for: label or next token, else the own prediction."""
    own = suffix.predictions()
    batch, reads = captured.taken.batch, captured.reads
    owner, token = reads.owner.to(own.device), reads.tokens[:, 0].to(own.device)
    labels = batch.get("labels")
    if worker.protocol.outcome in ("next", "last"):
        ids = batch["input_ids"].to(own.device)
        real = batch.get("attention_mask", torch.ones_like(ids)).to(own.device).bool()
        after = (token + 1).clamp(max=ids.shape[1] - 1)
        known = (token + 1 < ids.shape[1]) & real[owner, after]
        return torch.where(known, ids[owner, after], own)
    if labels is None:
        return own
    labels = labels.to(own.device)
    if worker.protocol.outcome == "classes":
        return labels[owner].long()
    found = labels[owner, token].long()
    return torch.where(found >= 0, found, own)
