"""The weights of each head as one vector: q, k, v and o, without biases."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy, Layer
from understudy.site import linear_map

# How families name their maps to queries, keys and values: three of them, or one.
_THREE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))


def parameter_vectors(body: Anatomy, index: int) -> np.ndarray:
    """`[heads, numbers]`; grouped-query heads use the keys and values of their group. NaN where units are no heads."""
    layer = body.sites[index]
    parts = _queries_keys_values(layer) if layer == body.layers[index] else None
    if parts is None:
        return np.full((layer.units, 1), np.nan)
    like = torch.zeros(1, layer.units * layer.width, device=body.device, dtype=body.dtype)
    output, _ = linear_map(layer, like)  # [units * width, residual]
    vectors = [part.flatten(1) for part in (*parts, output.reshape(layer.units, -1))]
    return torch.cat([part.double().cpu() for part in vectors], dim=1).numpy()


def _queries_keys_values(layer: Layer) -> list[Tensor] | None:
    """Each as `[heads, width, residual]`."""
    modules = dict(layer.attention.named_modules())
    leaves = {name.rpartition(".")[2]: module for name, module in modules.items()}
    for names in _THREE:
        if all(name in leaves for name in names):
            return [_by_head(_weight(leaves[name]), layer) for name in names]
    if "c_attn" in leaves:  # GPT-2: one after the other
        return [_by_head(part, layer) for part in _weight(leaves["c_attn"]).chunk(3)]
    if "qkv" in leaves:  # timm: one after the other
        return [_by_head(part, layer) for part in _weight(leaves["qkv"]).chunk(3)]
    if "query_key_value" in leaves:  # GPT-NeoX: the three of each head together
        each = _weight(leaves["query_key_value"]).view(layer.units, 3, layer.width, -1)
        return list(each.unbind(1))
    return None


def _weight(module: nn.Module) -> Tensor:
    """`[out, in]`, of a Linear or a Conv1D."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (weight.T if type(module).__name__ == "Conv1D" else weight).detach()


def _by_head(weight: Tensor, layer: Layer) -> Tensor:
    groups = weight.shape[0] // layer.width
    each = weight.view(groups, layer.width, -1)
    return each.repeat_interleave(layer.units // groups, dim=0)
