"""What conventional measures say of the units: importance, size and similarity, beside which CFS is held."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from understudy.identity import attributes
from understudy.lens.attention import attention_maps
from understudy.lens.parameters import parameter_vectors
from understudy.lens.passes import Given, collected, opened, targets
from understudy.meter import Progress
from understudy.resume import BUDGET, Suffix
from understudy.site import linear_map
from understudy.worker import Captured, Layers

PAIR = ("source", "substitute")


def signals(
    model: nn.Module,
    inputs: Given,
    *,
    layers: Layers = "last",
    units: str = "heads",
    outcome: str = "auto",
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure what importance and similarity say, for the same inputs and layers as a run.

    >>> import understudy as us
    >>> from understudy.lens.signals import signals
    >>> sorted(signals(us.load("digits"), us.digits(4)).data_vars)
    ['attention', 'cosine', 'norm', 'parameters', 'proximity', 'taylor']

    | variable | dims | |
    |---|---|---|
    | `taylor` | input, layer, substitute | `T_j = abs(∂L/∂g_j)` at gates of one, L the cross-entropy |
    | `norm` | input, layer, substitute | the length of the contribution `c_j`, over all tokens |
    | `cosine` | input, layer, source, substitute | of the contributions |
    | `proximity` | input, layer, source, substitute | `−|c_i − c_j| / (|c_i| + |c_j|)` |
    | `attention` | input, layer, source, substitute | cosine of the attention maps; NaN where a model shows none |
    | `parameters` | layer, source, substitute | cosine of the weights of q, k, v and o, without biases |

    The cross-entropy is with the label or the next token, else with the model's own prediction. Tokens that are
    padding count in none of them. For units that are no heads, `attention` and `parameters` are NaN.
    """
    with opened(model, inputs, layers=layers, units=units, outcome=outcome, budget=budget) as worker:
        maps: dict[int, Tensor] = {}

        def each(captured: Captured, suffix: Suffix) -> dict[str, np.ndarray]:
            taylor = _taylor(suffix, targets(worker, captured, suffix))
            attention = _cosines(maps.get(suffix.layer.index), suffix.layer.units, captured)
            return {"taylor": taylor, **_contributions(suffix, captured), "attention": attention}

        found = collected(worker, each, progress, lambda batch: maps.update(attention_maps(worker, batch)))
        weights = [_cosine(parameter_vectors(worker.body, layer)) for layer in worker.protocol.layers]
        unit = np.arange(len(weights[0]))
        coords = {"input": list(worker.inputs.ids), "layer": list(worker.protocol.layers)}
        coords |= {"source": unit, "substitute": unit}
        known = attributes(worker.body, worker.inputs, worker.protocol, worker.dtype)
    variables = {
        name: (("input", "layer", *(PAIR if name not in ("taylor", "norm") else PAIR[1:])), values)
        for name, values in found.items()
    }
    variables["parameters"] = (("layer", *PAIR), np.stack(weights))
    return xr.Dataset(variables, coords, {**known, "search": "none"})


def _taylor(suffix: Suffix, towards: Tensor) -> np.ndarray:
    count, units = suffix.taken.count, suffix.layer.units
    owner = torch.arange(count)
    _, slopes = suffix.slopes(torch.ones(count, units), owner, towards=towards)
    values: np.ndarray = slopes.abs().cpu().numpy()
    return values


def _contributions(suffix: Suffix, captured: Captured) -> dict[str, np.ndarray]:
    """Lengths and similarities of the contributions, from their inner products: no bias, no padding."""
    layer, state = suffix.layer, captured.taken.sites[suffix.layer.index]
    inner = state.inner.to(suffix.dtype)
    weight, _ = linear_map(layer, inner)
    real = _real(captured, inner.shape[1])
    products = []
    for index in range(len(inner)):
        each = inner[index][real[index]].view(-1, layer.units, layer.width)
        parts = torch.einsum("tuw,uwd->utd", each, weight.view(layer.units, layer.width, -1)).flatten(1)
        products.append((parts @ parts.T).double().cpu().numpy())
    G = np.stack(products)
    square = np.einsum("nii->ni", G).clip(min=0)
    norm = np.sqrt(square)
    apart = np.sqrt((square[:, :, None] + square[:, None] - 2 * G).clip(min=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = G / (norm[:, :, None] * norm[:, None])
        proximity = -apart / (norm[:, :, None] + norm[:, None])
    return {"norm": norm, "cosine": cosine, "proximity": proximity}


def _cosines(maps: Tensor | None, units: int, captured: Captured) -> np.ndarray:
    """Cosines of the maps `[inputs, units, tokens, tokens]`, rows of padding left out."""
    if maps is None:
        return np.full((captured.taken.count, units, units), np.nan)
    real = _real(captured, maps.shape[-2])
    rows = [_cosine(each[:, keep].flatten(1).double().cpu().numpy()) for each, keep in zip(maps, real, strict=True)]
    return np.stack(rows)


def _cosine(vectors: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(vectors, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine: np.ndarray = vectors @ vectors.T / (norm[:, None] * norm)
    return cosine


def _real(captured: Captured, tokens: int) -> Tensor:
    """Which tokens are no padding."""
    mask = captured.taken.batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[1] != tokens:
        return torch.ones(captured.taken.count, tokens, dtype=torch.bool)
    return mask.bool().cpu()
