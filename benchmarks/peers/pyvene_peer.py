"""pyvene: a custom intervention on the input of the output projection, built once; a batch's gates are its argument.

Follows "Add New Intervention Type" and the string access to any module's input ("component": "<module>.input") of
pyvene 101, and `intervention_additional_kwargs`. Without unit locations the whole tensor is handed over at once, so no
row or head is looped over. pyvene always runs the whole model: it has no way to resume.
"""

from __future__ import annotations

import copy
from typing import Any

import pyvene
import torch
from benchmarks.cases import Case
from benchmarks.peers.contract import Way
from benchmarks.peers.divergence import Divergence
from benchmarks.peers.paths import PATHS, spread
from torch import Tensor


class _Gate(pyvene.SourcelessIntervention):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "keep_last_dim": True})  # [rows, tokens, width], not flattened

    def forward(self, base: Tensor, source: None = None, subspaces: None = None, *, scale: Tensor) -> Tensor:  # noqa: ARG002
        return base * scale


class Full(Way):
    """A full forward for each row."""

    def __init__(self, case: Case) -> None:
        # A copy, because pyvene freezes the parameters of the model that it wraps.
        model = copy.deepcopy(case.model)
        model.config.use_cache = False
        self.inputs = case.input(0)
        paths = PATHS[case.name]
        component = f"{paths.blocks}[{case.layer}].{paths.projection}.input"
        self.model = pyvene.IntervenableModel(
            pyvene.IntervenableConfig([{"component": component, "intervention": _Gate()}]), model
        )
        self.width = model.config.hidden_size // case.heads
        with torch.inference_mode():
            self.divergence = Divergence(model(**self.inputs).logits)

    def batch(self, gates: Tensor) -> Tensor:
        rows = {name: value.expand(len(gates), *value.shape[1:]) for name, value in self.inputs.items()}
        _, outcome = self.model(rows, intervention_additional_kwargs={"scale": spread(gates, self.width)})
        return self.divergence(outcome.logits)
