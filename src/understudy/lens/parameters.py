"""The weights of each head: its maps to queries, keys and values, and all of them as one vector."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy, Layer
from understudy.site import linear_map

# How families name their maps to queries, keys and values: three of them, or one.
_THREE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))


class Projection(NamedTuple):
    """A map from the attention's input into each head."""

    weight: Tensor  # [heads, width, residual]
    bias: Tensor  # [heads, width]; zero where there is none


def parameter_vectors(body: Anatomy, index: int) -> np.ndarray:
    """`[heads, numbers]`; grouped-query heads use the keys and values of their group. NaN where units are no heads."""
    layer = body.sites[index]
    parts = projections(layer) if layer == body.layers[index] else None
    if parts is None:
        return np.full((layer.units, 1), np.nan)
    like = torch.zeros(1, layer.units * layer.width, device=body.device, dtype=body.dtype)
    output, _ = linear_map(layer, like)  # [units * width, residual]
    vectors = [part.flatten(1) for part in (*(part.weight for part in parts), output.reshape(layer.units, -1))]
    return torch.cat([part.double().cpu() for part in vectors], dim=1).numpy()


def projections(layer: Layer) -> list[Projection] | None:
    """The maps to queries, keys and values of a layer of heads, with their biases; None where they are not known."""
    parts = _queries_keys_values(layer)
    return None if parts is None else [Projection(part[..., :-1], part[..., -1]) for part in parts]


def _queries_keys_values(layer: Layer) -> list[Tensor] | None:
    """Each as `[heads, width, residual + 1]`, the bias last."""
    modules = dict(layer.attention.named_modules())
    leaves = {name.rpartition(".")[2]: module for name, module in modules.items()}
    for names in _THREE:
        if all(name in leaves for name in names):
            return [_by_head(_affine(leaves[name]), layer) for name in names]
    if "c_attn" in leaves:  # GPT-2: one after the other
        return [_by_head(part, layer) for part in _affine(leaves["c_attn"]).chunk(3)]
    if "qkv" in leaves:  # timm: one after the other
        return [_by_head(part, layer) for part in _affine(leaves["qkv"]).chunk(3)]
    if "query_key_value" in leaves:  # GPT-NeoX: the three of each head together
        each = _affine(leaves["query_key_value"]).view(layer.units, 3, layer.width, -1)
        return list(each.unbind(1))
    return None


def _affine(module: nn.Module) -> Tensor:
    """`[out, in + 1]`, of a Linear or a Conv1D: the weight, and the bias as one more column, so both are cut alike."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    weight = (weight.T if type(module).__name__ == "Conv1D" else weight).detach()
    bias = bias.detach() if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
    return torch.cat([weight, bias[:, None]], dim=1)


def _by_head(weight: Tensor, layer: Layer) -> Tensor:
    groups = weight.shape[0] // layer.width
    each = weight.view(groups, layer.width, -1)
    return each.repeat_interleave(layer.units // groups, dim=0)
