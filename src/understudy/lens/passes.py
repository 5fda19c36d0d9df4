"""What every analysis of the lens does: open a model for some layers, and walk over its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.meter import Meter, Progress
from understudy.resume import BUDGET, Suffix
from understudy.search import Search
from understudy.store import NOISE_FACTOR
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


def walk(
    worker: Worker, progress: Progress | None = None, before: Callable[[Captured], None] | None = None
) -> Iterator[tuple[Captured, Suffix]]:
    """Every batch of inputs at every layer; the layers of a batch follow each other.

    before: called with each batch while the model still has its own precision.
    """
    meter = Meter(progress, len(worker.inputs) * len(worker.protocol.layers))
    for captured in worker.captures(range(len(worker.inputs))):
        if before is not None:
            before(captured)
        for suffix in worker.suffixes(captured):
            yield captured, suffix
            meter.close(captured.taken.count)


def drops(suffix: Suffix, threshold: float) -> tuple[Tensor, Tensor]:
    """D_drop of every source of a batch, and which sources are valid: `[inputs, units]` each."""
    count, units = suffix.taken.count, suffix.layer.units
    noise = suffix.noise().cpu()
    alone, owners = (1 - torch.eye(units)).repeat(count, 1), torch.arange(count).repeat_interleave(units)
    drop = suffix.resume(alone, owners).cpu().view(count, units)
    return drop, drop > (NOISE_FACTOR * noise[:, None]).clamp(min=threshold)


def collected(
    worker: Worker,
    of: Callable[[Captured, Suffix], Mapping[str, np.ndarray]],
    progress: Progress | None = None,
    before: Callable[[Captured], None] | None = None,
) -> dict[str, np.ndarray]:
    """What is said `of` every batch at every layer, `[inputs, ...]` each, put together: `[input, layer, ...]`."""
    parts: dict[str, list[list[np.ndarray]]] = {}
    for captured, suffix in walk(worker, progress, before):
        for name, value in of(captured, suffix).items():
            batches = parts.setdefault(name, [])
            if suffix.layer.index == worker.protocol.layers[0]:
                batches.append([])
            batches[-1].append(value)
    return {name: np.concatenate([np.stack(each, axis=1) for each in batches]) for name, batches in parts.items()}


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
    if bool((labels >= suffix.classes).any()):
        raise UnderstudyError(f"A label is {int(labels.max())}, but the model has {suffix.classes} classes.")
    if worker.protocol.outcome == "classes":
        found = labels[owner].long()
        return torch.where(found >= 0, found, own)
    found = labels[owner, token].long()
    return torch.where(found >= 0, found, own)
