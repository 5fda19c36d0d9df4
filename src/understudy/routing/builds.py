"""How attention modules are built: which can run some of their heads alone, and their weights cut into heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy, Layer, family_key


@dataclass(frozen=True)
class Build:
    """How an attention module is built: the names of its parts, as attributes.

    kind: the class; another one may compute something else. into: the maps to queries, keys and values, or one that
    makes all three side by side. dropout: of the attention weights. after: what follows the projection. norms: of
    queries and keys. absent: parts that must not be there.
    """

    kind: str
    into: tuple[str, ...]
    out: str
    scale: str
    dropout: str
    mask: str = "attention_mask"
    after: str | None = None
    norms: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


_VIT = Build("ViTAttention", ("q_proj", "k_proj", "v_proj"), "o_proj", "scaling", "attention_dropout")
_GPT2 = Build("GPT2Attention", ("c_attn",), "c_proj", "scaling", "attn_dropout.p", after="resid_dropout")
_TIMM = Build(
    "Attention",
    ("qkv",),
    "proj",
    "scale",
    "attn_drop.p",
    mask="attn_mask",
    after="proj_drop",
    norms=("q_norm", "k_norm"),
    absent=("norm", "gate"),
)

BUILDS: dict[str, Build] = {
    "vit": _VIT,
    "deit": replace(_VIT, kind="DeiTAttention"),
    "dinov2": replace(_VIT, kind="Dinov2Attention"),
    "gpt2": _GPT2,
    "timm": _TIMM,
}


def supported(body: Anatomy, index: int) -> bool:
    """Whether a layer can run kept heads alone."""
    return obstacle(body, body.layers[body.layer_index(index)]) is None


def obstacle(body: Anatomy, layer: Layer) -> str | None:
    """Why a layer cannot run kept heads alone, or None."""
    build = BUILDS.get(str(family_key(body.model)))
    if build is None:
        return f"the attention of {body.family.title} is not known well enough"
    attention: Any = layer.attention
    kind = type(attention).__name__
    if kind != build.kind:
        return f"its attention is {kind}, not {build.kind}"
    unplain = [name for name in (*build.into, build.out) if not _plain(getattr(attention, name))]
    if unplain or "forward" in vars(attention):
        return f"its {unplain[0] if unplain else 'attention'} is changed (an adapter, a hook, quantized or offloaded)"
    extra = [name for name in build.absent if not isinstance(getattr(attention, name, None), nn.Identity | None)]
    if extra:
        return f"its attention has a {extra[0]} over all heads"
    if len({getattr(attention, name).bias is None for name in build.into}) > 1:
        return "only some of its queries, keys and values have a bias"
    way = implementation(attention)
    if way not in ("sdpa", "eager"):
        return f"its attention implementation is {way!r}, and only 'sdpa' and 'eager' compute the same"
    if way == "eager" and getattr(attention, "reorder_and_upcast_attn", False):
        return "it computes scores in float32 (reorder_and_upcast_attn)"
    return None


def implementation(attention: nn.Module) -> str:
    """How a module attends, by transformers' names; timm's is as good as "sdpa"."""
    return str(getattr(getattr(attention, "config", None), "_attn_implementation", "sdpa"))


class Weights(NamedTuple):
    """Views of a module's own weights, cut into heads."""

    into: tuple[Tensor, ...]  # queries, keys, values: [heads, unit, width] each
    biases: tuple[Tensor, ...] | None  # [heads, unit] each
    out: Tensor  # [heads, unit, width]
    bias: Tensor | None  # [width]

    def together(self, heads: Iterable[int]) -> dict[int, tuple[Tensor, Tensor | None]]:
        """For each head the weight and bias of its queries, keys and values: `[width, 3 * unit]` and `[3 * unit]`.

        One product of three times the width is faster than three, by more than the copy costs.
        """
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for head in heads:
            parts = [part[head] for part in self.into]
            # In the memory order of the weights: a copy that transposes takes several times as long.
            along = parts[0].stride(-1) == 1
            weight = torch.cat(parts).T if along else torch.cat([part.T for part in parts], -1)
            bias = None if self.biases is None else torch.cat([part[head] for part in self.biases])
            found[head] = (weight, bias)
        return found


def weights(layer: Layer, build: Build) -> Weights:
    """The weights of a layer's attention, cut into heads."""
    attention, heads, unit = layer.attention, layer.units, layer.width
    maps = [attrgetter(name)(attention) for name in build.into]
    each = 3 // len(maps)  # 1, or 3 in one map
    matrices = [part for one in maps for part in _matrix(one).view(each, heads, unit, -1)]
    known = [one.bias for one in maps if one.bias is not None]
    vectors = [part for bias in known for part in bias.view(each, heads, unit)]
    out = attrgetter(build.out)(attention)
    return Weights(tuple(matrices), tuple(vectors) if known else None, _matrix(out).T.view(heads, unit, -1), out.bias)


def picked(part: Tensor, kept: Tensor) -> Tensor:
    """Each input's own weights, from `[heads, unit, width]` to `[inputs, K * unit, width]`, in their memory order."""
    if part.stride(-1) == 1:
        return part[kept].flatten(1, 2)
    return part.permute(2, 0, 1)[:, kept].flatten(2).permute(1, 2, 0)


def _plain(part: Any) -> bool:
    """Whether a linear map is only its weight and bias: what else it did would be left out."""
    known = type(part) is nn.Linear or type(part).__name__ == "Conv1D"
    changed = part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
    return known and not changed and part.weight.device.type != "meta"


def _matrix(part: Any) -> Tensor:
    """A linear map's weight as `[out, in]`, which a Conv1D keeps the other way round."""
    weight: Tensor = part.weight
    return weight if isinstance(part, nn.Linear) else weight.T
