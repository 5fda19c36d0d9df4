"""Kept heads alone on timm's vision transformers, against slices set to zero; and routed by a router."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import understudy as us
from timm_models.test_timm import MODELS, SMALL, build, pictures
from understudy.anatomy import anatomy
from understudy.identity import fingerprint
from understudy.routing.builds import supported
from understudy.routing.compact import compact, compacted
from understudy.routing.lesson import summaries
from understudy.routing.network import RouterNetwork
from understudy.routing.online import routed
from understudy.routing.router import Card, Router

timm = pytest.importorskip("timm", reason="timm has an environment of its own: make test-timm")

INPUTS = LAYERS = HEADS = 3


def draw(keep, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(HEADS, generator=generator)[:keep] for _ in range(INPUTS)])


def zero(kept):
    mask = torch.zeros(INPUTS, HEADS, dtype=torch.float64).scatter_(1, kept, 1.0)
    return lambda _site, args: ((args[0].unflatten(-1, (HEADS, -1)) * mask[:, None, :, None]).flatten(-2),)


@pytest.mark.parametrize("way", ["heads", "gathered"])
@pytest.mark.parametrize("name", MODELS)
def test_kept_heads_alone_are_the_others_set_to_zero(name, way):
    model, x = build(name), pictures()["pixel_values"]
    for keep in (1, 2, 3):
        kept = {layer: draw(keep, seed=layer) for layer in range(LAYERS)}
        with ExitStack() as stack, torch.no_grad():
            for layer, own in kept.items():
                stack.enter_context(model.blocks[layer].attn.proj.register_forward_pre_hook(zero(own)))
            truth = model(x)
        choosers = {layer: lambda _residual, own=own: own for layer, own in kept.items()}
        with compacted(anatomy(model), choosers, way=way), torch.no_grad():
            found = model(x)
        assert (found - truth).abs().max() <= 1e-10 * truth.abs().max()


@pytest.mark.parametrize("name", ["class token", "mean pooled", "registers", "distilled"])
def test_routed(name):
    model, inputs = build(name), us.Inputs.of(pictures())
    body, x = anatomy(model), pictures()["pixel_values"]
    routers = []
    for layer in range(LAYERS):
        torch.manual_seed(layer)
        card = Card(body.name, fingerprint(body), layer, HEADS, SMALL["embed_dim"], "classes", (2,), "R1", 0)
        routers.append(Router(RouterNetwork(3 * SMALL["embed_dim"], HEADS).eval(), card))
    logits, masks = [], []
    for execution in ("compact", "gated"):
        with torch.no_grad(), routed(model, routers, keep=2, execution=execution) as chosen:
            logits.append(model(x))
        masks.append([chosen.of(layer) for layer in range(LAYERS)])
    assert (logits[0] - logits[1]).abs().max() <= 1e-10 * logits[1].abs().max()
    assert all(map(torch.equal, *masks))
    assert torch.equal(masks[0][0], routers[0].choose(summaries(model, inputs, layer=0), 2))


def test_attention_over_all_heads_is_refused():
    model = timm.models.VisionTransformer(**SMALL, scale_attn_norm=True)
    assert not supported(anatomy(model), 0)
    with pytest.raises(us.UnderstudyError, match="norm over all heads"):
        compact(anatomy(model), 0)
    model = timm.models.VisionTransformer(**SMALL, attn_layer="diff")
    with pytest.raises(us.UnderstudyError, match="its attention is DiffAttention, not Attention"):
        compact(anatomy(model), 0)
