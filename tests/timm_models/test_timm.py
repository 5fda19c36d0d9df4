"""timm's vision transformers: class token, pooled, distilled, layer scale, registers, against naive full forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import understudy as us
from families import lively
from naive import cfs, forward_logits, gate_site
from understudy.anatomy import anatomy
from understudy.capture import capture
from understudy.head import tokens_read
from understudy.surgery import opened

timm = pytest.importorskip("timm", reason="timm has an environment of its own: make test-timm")

SMALL = {"img_size": 16, "patch_size": 8, "in_chans": 1, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 7}
MODELS = {
    "class token": lambda: timm.models.VisionTransformer(**SMALL),
    "mean pooled": lambda: timm.models.VisionTransformer(**SMALL, global_pool="avg"),
    "attention pooled": lambda: timm.models.VisionTransformer(**SMALL, global_pool="map"),
    "layer scale": lambda: timm.models.VisionTransformer(**SMALL, init_values=0.5),
    "registers": lambda: timm.models.VisionTransformer(**SMALL, reg_tokens=2, no_embed_class=True),
    "pre-norm": lambda: timm.models.VisionTransformer(**SMALL, pre_norm=True, qk_norm=True),
    "post-norm": lambda: timm.models.VisionTransformer(**SMALL, block_fn=_post_norm(), init_values=0.5),
    "distilled": lambda: timm.models.deit.VisionTransformerDistilled(**SMALL),
}
READ = {"class token": 1, "mean pooled": 4, "attention pooled": 4, "registers": 1, "distilled": 2}


def _post_norm():
    from timm.models.vision_transformer import ResPostBlock

    return ResPostBlock


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = lively(MODELS[name]())
    for parameter in (p for n, p in model.named_parameters() if "token" in n or "pos_embed" in n):
        torch.nn.init.normal_(parameter, std=0.5)
    return model.to(dtype).eval()


def pictures(dtype=torch.float64):
    return {"pixel_values": torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(2), dtype=dtype)}


@pytest.mark.parametrize("name", MODELS)
def test_substitutability_equals_the_definition(name):
    model, inputs = build(name), pictures()
    sites = [block.attn.proj for block in model.blocks]
    for layer in range(3):
        run = us.measure(model, inputs, layers=layer, search="grid:4", threshold=1e-12)
        truth, _ = cfs(model, inputs, sites, layer, 3, "classes", torch.linspace(0, 3, 4, dtype=torch.float64))
        np.testing.assert_allclose(run["substitutability"].values[:, 0], truth.numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_check_passes(name, dtype):
    results = us.check(build(name, dtype))
    assert len(results) == 3
    assert all(result.passed for result in results), results


@pytest.mark.parametrize("name", READ)
def test_tokens_read(name):
    model, inputs = build(name), pictures()
    body = anatomy(model)
    with opened(model):
        mask = tokens_read(body, capture(body, inputs, [0]).final)
    assert mask.sum(-1).tolist() == [READ[name]] * 3


def test_gated():
    model, inputs = build("distilled"), pictures()
    sites = [block.attn.proj for block in model.blocks]
    with gate_site(sites, 1, 3, torch.tensor([0.0, 2.0, 1.0])):
        truth = forward_logits(model, inputs)
    with us.gated(model, {(1, 0): 0.0, (1, 1): 2.0}):
        found = forward_logits(model, inputs)
    assert torch.equal(found, truth)


def test_a_block_without_heads_is_refused():
    from timm.models.vision_transformer import ParallelScalingBlock

    model = timm.models.VisionTransformer(**SMALL, block_fn=ParallelScalingBlock)
    with pytest.raises(us.UnderstudyError, match=r"Layer 0 \(ParallelScalingBlock\) is not built as timm"):
        us.measure(model, pictures())


def test_names_that_timm_has_not():
    with pytest.raises(us.UnderstudyError, match="timm has no model 'vit_nano'"):
        us.load("timm/vit_nano")


def test_images_through_timms_own_transform(tmp_path):
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    batch = us.images(tmp_path, model).batch([0])
    assert batch["pixel_values"].shape == (1, 3, 224, 224)


def test_neurons_and_the_lens_on_timm_models():
    from understudy.lens.signals import signals

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=3, img_size=32, num_classes=10).eval()
    given = {"pixel_values": torch.randn(3, 3, 32, 32)}
    for units in ("heads", "neurons:8"):
        assert all(layer.passed for layer in us.check(model, given, units=units))
    before = model(given["pixel_values"])
    seen = signals(model, given, layers="all")
    assert torch.equal(model(given["pixel_values"]), before)
    for name in seen.data_vars:
        assert seen[name].notnull().all(), name
    block = model.blocks[1]
    block.attn.fused_attn = False
    maps = []
    with block.attn.attn_drop.register_forward_hook(lambda _m, args, _o: maps.append(args[0].detach())):
        model(given["pixel_values"])
    flat = maps[0][0].flatten(1).double()
    cosine = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1)
    torch.testing.assert_close(torch.from_numpy(seen["attention"].values[0, 1]), cosine, atol=1e-5, rtol=0)
    with pytest.raises(us.UnderstudyError, match="units='kv' needs query heads that share"):
        us.check(model, given, units="kv")
