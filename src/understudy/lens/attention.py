"""Attention maps, as the model's own eager attention shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy
from understudy.capture import Stop
from understudy.surgery import hooked, replaced
from understudy.worker import Captured, Worker


def attention_maps(worker: Worker, captured: Captured) -> dict[int, Tensor]:
    """The maps of a batch by layer, `[inputs, heads, tokens, tokens]`; layers that show none are left out.

    They are read in one more forward, under an eager implementation, in the model's own precision.
    """
    if worker.protocol.units != "heads":
        return {}
    body, layers = worker.body, set(worker.protocol.layers)
    found: dict[int, Tensor] = {}
    layer = -1

    def before_block(_block: nn.Module, _args: Any) -> None:
        nonlocal layer
        layer += 1

    def after_attention(_attention: nn.Module, _args: Any, output: Any) -> None:
        if layer in layers:
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if isinstance(weights, Tensor) and weights.ndim == 4:
                found[layer] = weights
        if layer == max(layers):
            raise Stop

    def after_dropout(_drop: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> None:
        if layer in layers and args[0].ndim == 4:
            found[layer] = args[0]

    handles = [entry.register_forward_pre_hook(before_block) for entry in {x.block for x in body.layers}]
    for attention in {x.attention for x in body.layers}:
        handles.append(attention.register_forward_hook(after_attention))
        if not body.family.weights and isinstance(drop := getattr(attention, "attn_drop", None), nn.Module):
            handles.append(drop.register_forward_hook(after_dropout))  # timm: the only place where a map is seen
    arguments = body.arguments(captured.taken.batch)
    with hooked(handles), _eager_attention(body), torch.no_grad(), suppress(Stop):
        body.run(arguments)
    return found


@contextmanager
def _eager_attention(body: Anatomy) -> Iterator[None]:
    """Attention that is written out, so that its maps exist."""
    configs = {id(config): config for m in body.model.modules() if (config := getattr(m, "config", None)) is not None}
    name = "_attn_implementation_internal"
    changes: list[tuple[object, str, Any]] = [(c, name, "eager") for c in configs.values() if hasattr(c, name)]
    changes += [(module, "fused_attn", False) for module in body.model.modules() if "fused_attn" in vars(module)]
    with replaced(changes):
        yield
