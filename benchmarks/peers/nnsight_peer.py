"""nnsight: a trace over an expanded batch; to resume, `.skip()` with what a first trace saved.

Follows "Accessing and modifying activations" (`module.input = ...`) and "Skipping modules" (`module.skip(replacement)`)
of its documentation, and its advice on speed: one batched trace, skip what can be skipped, save only what is needed.
One invoke with an expanded batch is faster than one invoke for each row, which runs the block's Python for each row and
copies the whole batch at each edit. D is computed inside the trace, so that no logits are kept.
"""

from __future__ import annotations

import copy
from operator import attrgetter

import torch
from benchmarks.cases import Case
from benchmarks.peers.contract import Way
from benchmarks.peers.divergence import Divergence
from benchmarks.peers.paths import PATHS, spread
from nnsight import NNsight
from torch import Tensor


class Full(Way):
    """A full forward for each row."""

    def __init__(self, case: Case) -> None:
        # A copy, because nnsight instruments the modules that it wraps.
        inner = copy.deepcopy(case.model)
        inner.config.use_cache = False
        self.model = NNsight(inner)
        (self.inputs,) = case.input(0).values()
        paths = PATHS[case.name]
        self.blocks = attrgetter(paths.blocks)(self.model)
        self.layer = case.layer
        self.attention = attrgetter(paths.attention)(self.blocks[case.layer])
        self.projection = attrgetter(paths.projection)(self.blocks[case.layer])
        self.embeddings = attrgetter(paths.embeddings)(self.model)
        with torch.inference_mode(), self.model.trace(self.inputs):
            residual = self.blocks[self.layer].input.save()
            inner = self.projection.input.save()
            attended = self.attention.output.save()
            logits = self.model.output.logits.save()
        self.residual, self.inner, self.paired = residual, inner, isinstance(attended, tuple)
        self.width = inner.shape[-1] // case.heads
        self.divergence = Divergence(logits)

    def batch(self, gates: Tensor) -> Tensor:
        scale = spread(gates, self.width)
        rows = self.inputs.expand(len(gates), *self.inputs.shape[1:])
        with self.model.trace(rows):
            self.projection.input = self.projection.input * scale
            found = self.divergence(self.model.output.logits).save()
        return found  # noqa: RET504 - the block runs elsewhere, and only what it saves comes back


class Resume(Full):
    """The embeddings, the blocks before and the layer's own attention are skipped; only its projection is run."""

    def batch(self, gates: Tensor) -> Tensor:
        scale = spread(gates, self.width)
        rows = self.inputs.expand(len(gates), *self.inputs.shape[1:])
        residual = self.residual.expand(len(gates), -1, -1)
        with self.model.trace(rows):
            self.embeddings.skip(residual)
            for block in self.blocks[: self.layer]:
                block.skip(residual)
            projected = self.projection(self.inner * scale)
            self.attention.skip((projected, None) if self.paired else projected)
            found = self.divergence(self.model.output.logits).save()
        return found  # noqa: RET504 - the block runs elsewhere, and only what it saves comes back
