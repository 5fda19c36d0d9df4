"""captum: `FeatureAblation` with `perturbations_per_eval`, where each feature is one intervention.

captum replaces features of an input by a baseline and returns what that changes in the value of a forward function. The
input here is a vector of switches, one for each intervention, all off; its baseline is on. The forward function turns
switches into gates by one matrix product, gates the heads with a hook, and returns D. So each row that captum runs is
one intervention, and one more row for each call is its own forward of the unchanged input, whose D is zero.

(Heads themselves as features, their gates as baselines, would run one row more in each twelve: captum also replaces the
removed head.) captum always runs the whole forward function: it has no way to resume.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from benchmarks.cases import Case
from benchmarks.peers.contract import Way
from benchmarks.peers.divergence import Divergence
from benchmarks.peers.paths import PATHS, spread
from captum.attr import FeatureAblation
from torch import Tensor, nn


class Full(Way):
    """A full forward for each row."""

    extra_rows = 1

    def __init__(self, case: Case) -> None:
        self.model, self.inputs, self.heads = case.model, case.input(0), case.heads
        self.options = {"use_cache": False} if "input_ids" in self.inputs else {}
        paths = PATHS[case.name]
        self.projection: nn.Module = attrgetter(paths.projection)(attrgetter(paths.blocks)(self.model)[case.layer])
        self.width = self.model.config.hidden_size // case.heads
        with torch.inference_mode():
            self.divergence = Divergence(self.model(**self.inputs, **self.options).logits)

    def _divergence(self, switches: Tensor, table: Tensor) -> Tensor:
        """D of each row of `switches` `[rows, interventions]`; `table` holds each intervention's gates, less one."""
        scale = spread(1 + switches @ table, self.width)
        rows = {name: value.expand(len(scale), *value.shape[1:]) for name, value in self.inputs.items()}
        handle = self.projection.register_forward_pre_hook(lambda _module, args: (args[0] * scale,))
        try:
            return self.divergence(self.model(**rows, **self.options).logits)
        finally:
            handle.remove()

    def batch(self, gates: Tensor) -> Tensor:
        return self(gates)

    def __call__(self, gates: Tensor) -> Tensor:
        """All rows in one call, so that captum runs the unchanged input only once."""
        ablation = FeatureAblation(lambda switches: self._divergence(switches, gates - 1))
        with torch.inference_mode():
            change = ablation.attribute(
                torch.zeros(1, len(gates)), baselines=1.0, perturbations_per_eval=self.rows_at_once
            )
        return -change[0]
