"""A site as a matrix: whatever kind of linear module it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from understudy.anatomy import Layer
from understudy.errors import UnderstudyError


def linear_map(layer: Layer, like: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix of a site, `[units * width, residual width]`, and its bias, whatever kind of linear module it is.

    A plain Linear or Conv1D shows its weight. Others (LoRA, weight-only quantized, offloaded, hooked by the user) are
    asked: their answer to the identity, less their answer to zero.
    """
    site, size = layer.site, layer.units * layer.width
    zero = site(like.new_zeros(1, size))
    weight = getattr(site, "weight", None)
    bare = not site._forward_hooks and not site._forward_pre_hooks
    if bare and isinstance(weight, Tensor) and weight.device == like.device and weight.dtype == like.dtype:
        if type(site) is nn.Linear:
            return weight.detach().T, zero[0]
        if type(site).__name__ == "Conv1D":
            return weight.detach(), zero[0]
    answer: Tensor = site(torch.eye(size, dtype=like.dtype, device=like.device)) - zero
    sample = like.flatten(0, -2)[:8]
    truth = site(sample)
    if not torch.allclose(sample @ answer + zero, truth, rtol=1e-2, atol=1e-2 * float(truth.abs().max())):
        raise UnderstudyError(
            f"The output projection of layer {layer.index} ({type(site).__name__}) is not a linear map: a module that "
            "quantizes its activations cannot be cut into heads. Load the model without that quantization."
        )
    return answer, zero[0]
