"""Kept heads alone give what the model's own forward gives with the other heads' slices set to zero."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import understudy as us
from families import CASES, HEADS, LAYERS, batch, build
from naive import forward_logits
from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError
from understudy.routing import compact as compact_module
from understudy.routing.builds import supported
from understudy.routing.compact import compact, compacted

COMPACT = ("vit", "deit", "deit-distilled", "dinov2", "gpt2", "gpt2-classes")
WAYS = ("heads", "gathered")


@contextmanager
def zeroed(sites, kept):
    """The plain truth: at each layer, slices of the projection's input that an input does not keep become zero."""

    def hook(mask):
        def zero(_site, args):
            parts = args[0].unflatten(-1, (HEADS, -1))
            return ((parts * mask[:, None, :, None]).flatten(-2),)

        return zero

    with ExitStack() as stack:
        for layer, own in kept.items():
            mask = torch.zeros(len(own), HEADS, dtype=torch.bool)
            for row, heads in enumerate(own.tolist()):
                mask[row, heads] = True
            stack.callback(sites[layer].register_forward_pre_hook(hook(mask)).remove)
        yield


def draw(inputs, keep, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(HEADS, generator=generator)[:keep] for _ in range(inputs)])


def choosers(kept):
    return {layer: lambda _residual, own=own: own for layer, own in kept.items()}


def both(name, kept, inputs, way="auto", model=None):
    model = model or build(name)
    with zeroed(CASES[name].sites(model), kept):
        truth = forward_logits(model, inputs)
    with compacted(anatomy(model), choosers(kept), way=way):
        found = forward_logits(model, inputs)
    return found, truth


def same(found, truth, tolerance=1e-10):
    assert (found - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.fixture
def large_heads(monkeypatch):
    """Let these small heads count as large, so that "auto" takes them one by one wherever it may."""
    monkeypatch.setattr(compact_module, "_LARGE", 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COMPACT)
def test_all_layers_each_input_its_own_heads(name, way):
    inputs = batch(name, 6)  # texts are padded on both sides
    for keep in range(1, HEADS + 1):
        kept = {layer: draw(6, keep, seed=layer) for layer in range(LAYERS)}
        assert keep == HEADS or len(kept[0].sort(-1).values.unique(dim=0)) > 1
        same(*both(name, kept, inputs, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_equal_heads_one_input_and_one_layer(name, way):
    same(*both(name, {1: torch.tensor([[3, 0]]).expand(5, 2)}, batch(name, 5), way))
    same(*both(name, {0: torch.tensor([[2]]), 2: torch.tensor([[0, 1, 3]])}, batch(name, 1), way))


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_all_heads_are_the_dense_model(name):
    model, inputs = build(name), batch(name)
    everything = {layer: torch.arange(HEADS).flip(0).expand(4, HEADS) for layer in range(LAYERS)}
    same(both(name, everything, inputs, model=model)[0], forward_logits(model, inputs))


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_equals_gates_of_zero(name):
    model, inputs = build(name), batch(name)
    with us.gated(model, {(1, 0): 0.0, (1, 2): 0.0}):
        truth = forward_logits(model, inputs)
    with compacted(anatomy(model), choosers({1: torch.tensor([[1, 3]]).expand(4, 2)})):
        same(forward_logits(model, inputs), truth)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_single_precision(name, way):
    model = build(name, torch.float32)
    kept = {layer: draw(4, 2, seed=layer) for layer in range(LAYERS)}
    same(*both(name, kept, batch(name, dtype=torch.float32), way, model), tolerance=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_gpt2_without_padding_is_causal(way):
    inputs = {"input_ids": batch("gpt2")["input_ids"]}
    same(*both("gpt2", {0: draw(4, 2), 1: draw(4, 2, 1)}, inputs, way))


@pytest.mark.parametrize("way", WAYS)
def test_scales_eager_attention_and_no_bias(way):
    kept = {layer: draw(4, 2, seed=layer) for layer in range(LAYERS)}
    model = build("gpt2")
    for at, block in enumerate(model.transformer.h):
        block.attn.scaling = 0.3 / (at + 1)  # what scale_attn_by_inverse_layer_idx and the like come to
    same(*both("gpt2", kept, batch("gpt2"), way, model))
    model.set_attn_implementation("eager")
    same(*both("gpt2", kept, batch("gpt2"), way, model))
    model = build("vit")
    for layer in model.vit.layers:
        for part in (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj, layer.attention.o_proj):
            part.bias = None
    same(*both("vit", kept, batch("vit"), way, model))


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_its_own_for_each_head(way):
    layer = anatomy(build("vit")).layers[0]
    hidden = torch.randn(3, 5, 32, dtype=torch.float64)
    mask = torch.randn(3, HEADS, 5, 5, dtype=torch.float64)
    kept = draw(3, 2)
    with torch.no_grad():
        with zeroed([layer.site], {0: kept}):
            truth, _ = layer.attention(hidden, mask)
        same(compact(anatomy(build("vit")), 0, way=way).run(hidden, kept, mask), truth)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_run_is_the_attention_module(implementation):
    body = anatomy(build("gpt2"))
    body.model.set_attn_implementation(implementation)
    hidden, kept = torch.randn(3, 7, 32, dtype=torch.float64), draw(3, 2)
    with torch.no_grad(), zeroed([body.layers[2].site], {0: kept}):
        truth, _ = body.layers[2].attention(hidden)
    with torch.no_grad():
        same(compact(body, -1).run(hidden, kept), truth)


def test_the_chooser_sees_the_residual_of_a_routed_model():
    model, inputs = build("vit"), batch("vit")
    kept, seen, truth = {0: draw(4, 1), 2: draw(4, 3)}, {}, {}

    def watch(layer):
        return lambda _block, args: truth.__setitem__(layer, args[0])

    def choose(layer):
        return lambda residual: seen.__setitem__(layer, residual) or kept[layer]

    handles = [model.vit.layers[layer].register_forward_pre_hook(watch(layer)) for layer in kept]
    with zeroed(CASES["vit"].sites(model), kept):
        forward_logits(model, inputs)
    for handle in handles:
        handle.remove()
    with compacted(anatomy(model), {0: choose(0), -1: choose(2)}):
        forward_logits(model, inputs)
    for layer in kept:
        same(seen[layer], truth[layer])


def test_heads_are_chosen_anew_by_each_forward():
    model, inputs = build("gpt2"), batch("gpt2")
    turns = [draw(4, 2, seed) for seed in range(3)]
    waiting = iter(turns)
    with compacted(anatomy(model), {1: lambda _residual: next(waiting)}):
        found = [forward_logits(model, inputs) for _ in turns]
    for own, logits in zip(turns, found, strict=True):
        same(logits, both("gpt2", {1: own}, inputs, model=model)[1])


def test_weights_are_read_at_each_run():
    model, inputs = build("vit"), batch("vit")
    kept = {0: draw(4, 2)}
    with compacted(anatomy(model), choosers(kept)):
        before = forward_logits(model, inputs)
        model.vit.layers[0].attention.v_proj.weight.data *= 2
        after = forward_logits(model, inputs)
    assert not torch.allclose(before, after)
    same(after, both("vit", kept, inputs, model=model)[1])


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_gradients_are_those_of_gates(name, large_heads):  # noqa: ARG001
    model, inputs = build(name), batch(name)
    kept = {layer: draw(4, 2, seed=layer) for layer in range(LAYERS)}

    def gradients():
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    with zeroed(CASES[name].sites(model), kept):
        truth = gradients()
    with compacted(anatomy(model), choosers(kept)):
        found = gradients()
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        assert torch.allclose(found[key], value, rtol=1e-8, atol=1e-10 * float(value.abs().max()) + 1e-12), key


def state(model):
    """Everything about a model that could stay behind: weights, hooks, forwards, modes, settings."""
    return {
        "weights": {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()},
        "modules": [
            (key, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), vars(m).get("forward"))
            for key, m in model.named_modules()
        ],
        "config": copy.deepcopy(model.config.to_dict()),
    }


def unchanged(before, after):
    assert before["modules"] == after["modules"]
    assert before["config"] == after["config"]
    for key, (place, value) in before["weights"].items():
        assert after["weights"][key][0] == place
        assert torch.equal(after["weights"][key][1], value)


class Broken(Exception):
    pass


def failing(_residual):
    raise Broken


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_the_model_is_as_before(name):
    model, inputs = build(name), batch(name)
    before, dense = state(model), forward_logits(model, inputs)
    kept = {layer: draw(4, 2) for layer in range(LAYERS)}
    with compacted(anatomy(model), choosers(kept)):
        assert not torch.equal(forward_logits(model, inputs), dense)
    unchanged(before, state(model))
    with pytest.raises(Broken), compacted(anatomy(model), choosers(kept) | {1: failing}):
        forward_logits(model, inputs)
    unchanged(before, state(model))
    assert torch.equal(forward_logits(model, inputs), dense)


@pytest.mark.parametrize("silent", ["attn_dropout", "resid_dropout"])
def test_dropout_follows_the_mode_of_the_model(silent):
    model, inputs = build("gpt2"), batch("gpt2")  # 0.1 everywhere by default
    model.transformer.h[0].attn.get_submodule(silent).p = 0.0  # so that the other one is seen
    kept = {0: draw(4, 2)}
    same(*both("gpt2", kept, inputs, model=model))
    with compacted(anatomy(model), choosers(kept)):
        quiet = forward_logits(model, inputs)
        model.transformer.h[0].attn.train()
        assert not torch.allclose(forward_logits(model, inputs), quiet)


def test_autocast(large_heads):  # noqa: ARG001
    model, inputs = build("vit", torch.float32), batch("vit", dtype=torch.float32)
    kept = {layer: draw(4, 2, seed=layer) for layer in range(LAYERS)}
    with torch.autocast("cpu", torch.bfloat16):
        found, truth = both("vit", kept, inputs, model=model)
    assert found.dtype == truth.dtype
    same(found.float(), truth.float(), tolerance=0.05)


def test_generation_without_a_cache():
    model = build("gpt2")
    ids = batch("gpt2", 1)["input_ids"]
    kept = {1: torch.tensor([[0, 2]])}
    settings = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "eos_token_id": None}
    with zeroed(CASES["gpt2"].sites(model), kept):
        truth = model.generate(ids, **settings)
    with compacted(anatomy(model), choosers(kept)):
        assert torch.equal(model.generate(ids, **settings), truth)


def test_a_cache_is_refused():
    model, ids = build("gpt2"), batch("gpt2", 1)["input_ids"]
    before = state(model)
    chosen = choosers({1: torch.tensor([[0, 2]])})
    with pytest.raises(UnderstudyError, match="use_cache=False"), compacted(anatomy(model), chosen):
        model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=True)
    with pytest.raises(UnderstudyError, match=r"Layer 1 runs only .* key-value cache"):  # noqa: SIM117
        with compacted(anatomy(model), chosen):
            model(ids, use_cache=True)
    unchanged(before, state(model))
    with compacted(anatomy(model), chosen), torch.no_grad():
        assert model(ids).past_key_values is None


@pytest.mark.parametrize("name", [name for name in CASES if name not in COMPACT])
def test_other_families_are_refused(name):
    body = anatomy(build(name))
    assert not supported(body, 0)
    with pytest.raises(UnderstudyError, match=r"cannot run kept heads alone.*ViT.*GPT-2.*understudy\.gated"):
        compact(body, 0)
    with pytest.raises(UnderstudyError, match="cannot run"), compacted(body, {0: failing}):
        pass


def test_what_would_be_left_out_is_refused():
    model = build("vit")
    assert all(supported(anatomy(model), layer) for layer in range(-LAYERS, LAYERS))
    with us.gated(model, {(0, 1): 0.5}):
        with pytest.raises(UnderstudyError, match="its o_proj is changed"):
            compact(anatomy(model), 0)
        forward_logits(model, batch("vit"))

    class Adapted(nn.Linear):
        pass

    model.vit.layers[0].attention.q_proj = Adapted(32, 32).double()
    with pytest.raises(UnderstudyError, match="its q_proj is changed"):
        compact(anatomy(model), 0)
    assert supported(anatomy(model), 1)
    model.vit.layers[1].attention.k_proj.bias = None
    with pytest.raises(UnderstudyError, match=r"only some .* have a bias"):
        compact(anatomy(model), 1)
    model = build("gpt2")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnderstudyError, match="'flash_attention_2'"):
        compact(anatomy(model), 0)
    model.config._attn_implementation = "eager"
    model.transformer.h[0].attn.reorder_and_upcast_attn = True
    with pytest.raises(UnderstudyError, match="reorder_and_upcast_attn"):
        compact(anatomy(model), 0)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.zeros(4, HEADS, dtype=torch.bool), r"int64.*\[4, 1 to 4\].*bool \[4, 4\]"),
        (torch.zeros(3, 2, dtype=torch.long), r"int64 \[3, 2\]"),
        (torch.zeros(4, 0, dtype=torch.long), r"int64 \[4, 0\]"),
        (torch.tensor([[0, 0]]).expand(4, 2), "at most once"),
        (torch.tensor([[0, HEADS]]).expand(4, 2), "0 to 3"),
        (torch.tensor([[-1, 0]]).expand(4, 2), "0 to 3"),
    ],
)
def test_kept_heads_that_are_not_possible(kept, message):
    model = build("vit")
    with pytest.raises(UnderstudyError, match=message), compacted(anatomy(model), choosers({0: kept})):
        forward_logits(model, batch("vit"))


def test_wrong_use():
    model = build("vit")
    body = anatomy(model)
    with pytest.raises(UnderstudyError, match="Layer 3 is not there"):
        compact(body, 3)
    with pytest.raises(UnderstudyError, match="way='fast'"):
        compact(body, 0, way="fast")
    with pytest.raises(UnderstudyError, match="Layer 2 was given twice"), compacted(body, {2: failing, -1: failing}):
        pass
    with pytest.raises(UnderstudyError, match="no forward of the model ran there"), compacted(body, {2: failing}):
        pass
    with compacted(body, choosers({2: draw(4, 1)})):
        forward_logits(model, batch("vit"))
        with pytest.raises(UnderstudyError, match="called alone"):
            body.layers[2].attention(torch.randn(4, 5, 32, dtype=torch.float64))
    with pytest.raises(UnderstudyError, match="called with position_bias"):
        compact(body, 0).run(
            torch.randn(1, 5, 32, dtype=torch.float64), torch.tensor([[0]]), position_bias=torch.ones(1)
        )
