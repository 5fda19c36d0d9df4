"""check: the proof, on any model, that the engine computes what the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from understudy import head
from understudy import outcome as outcomes
from understudy.anatomy import Anatomy, anatomy
from understudy.capture import Capture, capture
from understudy.errors import UnderstudyError
from understudy.gates import gated
from understudy.inputs.batch import Batch, Inputs, as_inputs
from understudy.inputs.chance import chance
from understudy.precision import Precision
from understudy.resume import Suffix
from understudy.surgery import opened

# The largest difference allowed, relative to the largest value where that is above one.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True)
class LayerCheck:
    """The largest differences at one layer, relative to the largest value where that is above one.

    dense: the model's own logits against resuming with all gates at one.
    gated: the model's own forward under random gates against resuming with them.
    parts: the site's output against its bias plus the sum of the contributions.
    """

    layer: int
    dense: float
    gated: float
    parts: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether all three are within the tolerance; NaN is not."""
        return all(value <= self.tolerance for value in (self.dense, self.gated, self.parts))


def check(
    model: nn.Module,
    inputs: Inputs | Mapping[str, Tensor] | None = None,
    *,
    units: str = "heads",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> list[LayerCheck]:
    """Compare the engine with the model's own full forward, at every layer.

    >>> import understudy as us
    >>> all(layer.passed for layer in us.check(us.load("digits")))
    True

    units: "heads", "kv" or "neurons:N". Without inputs, random ones are used. A half-precision model is checked in
    float32, since its own rounding would hide any difference.
    """
    body = anatomy(model).cut(units)
    outcome = outcomes.resolve(body, "auto")
    batch = (
        chance(body, seed=seed) if inputs is None else as_inputs(inputs).batch(range(min(3, len(as_inputs(inputs)))))
    )
    if inputs is None and outcome == "classes":
        batch.pop("positions", None)
    precision = Precision(body, dtype, 0)
    with opened(body.model), precision.applied():
        taken = capture(body, batch, range(len(body.layers)))
        reads = outcomes.reads(body, taken, outcome, [str(index) for index in range(taken.count)])
        return [
            _check_layer(body, batch, taken, Suffix(body, taken, layer.index, reads, dtype=body.dtype), seed, units)
            for layer in body.layers
        ]


def _check_layer(body: Anatomy, batch: Batch, taken: Capture, suffix: Suffix, seed: int, units: str) -> LayerCheck:
    layer = suffix.layer
    gates = 2 * torch.rand(layer.units, generator=torch.Generator().manual_seed(seed + layer.index))
    full = _full(body, batch, suffix, {(layer.index, u): float(g) for u, g in enumerate(gates)}, units)
    dense = _full(body, batch, suffix, {}, units)
    if not bool(dense.isfinite().all()):
        raise UnderstudyError(
            f"The logits of {body.name} are not numbers: its weights or these inputs hold NaN or infinity."
        )
    owner = torch.arange(taken.count)

    def resumed(values: Tensor) -> Tensor:
        rows = values.expand(taken.count, -1).to(suffix.residual)
        return suffix._logits(suffix.states(rows, owner, {}))

    inner = suffix.inner.view(*suffix.inner.shape[:2], layer.units, layer.width)
    contributions = torch.einsum("ctuw,uwd->ctud", inner, suffix.weight.view(layer.units, layer.width, -1))
    return LayerCheck(
        layer.index,
        _distance(dense, resumed(torch.ones(layer.units))),
        _distance(full, resumed(gates)),
        _distance(suffix.out, suffix.bias + contributions.sum(2)),
        TOLERANCE.get(suffix.dtype, 1e-2),
    )


def _full(body: Anatomy, batch: Batch, suffix: Suffix, gates: dict[tuple[int, int], float], units: str) -> Tensor:
    arguments = body.arguments(batch)
    with gated(body.model, gates, units=units):
        logits = head.output_logits(body, body.run(arguments))
    if logits.ndim == 2:
        return logits
    return logits[suffix.reads.owner, suffix.reads.tokens[:, 0]]


def _distance(truth: Tensor, found: Tensor) -> float:
    return float((truth - found).abs().max() / truth.abs().max().clamp(min=1.0))
