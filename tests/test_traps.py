"""Things that a resumed forward gets wrong if nobody looks."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

import understudy as us
from families import CASES, HEADS, LAYERS, batch, build
from naive import cfs, forward_logits
from understudy import divergence
from understudy.anatomy import anatomy
from understudy.batches import batches
from understudy.capture import Capture, capture
from understudy.head import tokens_read
from understudy.measurement import measure
from understudy.surgery import opened

GRID = torch.linspace(0, 3, 4, dtype=torch.float64)


def agrees(model, inputs, name, layer, outcome, tolerance=1e-6, **options):
    run = measure(model, inputs, layers=layer, search="grid:4", threshold=1e-12, outcome=outcome, **options)
    truth, _ = cfs(model, inputs, CASES[name].sites(model), layer, HEADS, outcome, GRID)
    found = torch.from_numpy(run["substitutability"].values[:, 0]).double()
    return bool((found - truth).nan_to_num(0).abs().max() <= tolerance) and torch.equal(found.isnan(), truth.isnan())


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "qwen2"])
def test_no_key_value_cache_is_used_or_filled(name, monkeypatch):
    from transformers.cache_utils import Cache

    model, inputs = build(name), batch(name)
    model.config.use_cache = True
    updates = []
    monkeypatch.setattr(Cache, "update", lambda *args, **_: updates.append(args))
    measure(model, inputs, layers=0, search="grid:3")
    assert updates == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("layer", [1, 2])
def test_one_query_in_mid_sequence_does_not_see_the_future(name, layer, implementation):
    model = build(name)
    model.set_attn_implementation(implementation)
    inputs = {"input_ids": batch(name)["input_ids"].clamp(min=6)}  # no mask at all: SDPA is causal by itself
    inputs["positions"] = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    inputs["positions"][:, 3] = True
    assert agrees(model, inputs, name, layer, "next")
    later = {**inputs, "input_ids": inputs["input_ids"].clone()}
    later["input_ids"][:, 4:] = 7  # what comes after must not matter
    a, b = (measure(model, x, layers=layer, search="grid:4")["drop"].values for x in (inputs, later))
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_arguments_follow_the_rows_only_where_they_are_per_input():
    taken = Capture(3, 7, {})
    owner = torch.tensor([2, 2, 0])
    mask, shared, table = torch.arange(3.0).view(3, 1, 1, 1), torch.zeros(1, 1, 7, 7), torch.zeros(7)
    rows = taken.rows({"a": 1} | {}, owner), taken.rows((mask, shared, table, None), owner)
    assert rows[1][0].flatten().tolist() == [2, 2, 0]
    assert rows[1][1] is shared
    assert rows[1][2] is table
    assert rows[1][3] is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_as_many_inputs_as_tokens(name):
    # Seven inputs of seven tokens: a table over tokens must not be taken for one over inputs.
    model = build(name)
    ids = torch.randint(6, 60, (7, 7), generator=torch.Generator().manual_seed(4))
    assert agrees(model, {"input_ids": ids}, name, 1, "next", batch_size=7)


@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("name", ["vit", "bert", "albert", "gpt2", "llama"])
def test_batch_size_does_not_matter_and_padding_never_counts(name, size):
    model, inputs = build(name), batch(name, count=5)
    assert agrees(model, inputs, name, 1, CASES[name].outcome, batch_size=size)


def test_padding_longer_than_needed_changes_nothing():
    model, inputs = build("bert"), batch("bert")
    padded = {key: torch.nn.functional.pad(value, (0, 4)) for key, value in inputs.items()}
    a, b = (measure(model, x, layers="all", search="grid:4")["substitutability"].values for x in (inputs, padded))
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_order_and_precision(name, dtype):
    model, inputs = build(name, getattr(torch, dtype)), batch(name, dtype=getattr(torch, dtype))
    tolerance = {"float64": 1e-6, "float32": 1e-3}[dtype]
    forward = measure(model, inputs, layers=1, search="grid:4")
    backward = measure(model, {key: value.flip(0) for key, value in inputs.items()}, layers=1, search="grid:4")
    a, b = forward["substitutability"].values, backward["substitutability"].values[::-1]
    assert np.isfinite(a).any()
    np.testing.assert_allclose(a, b, atol=tolerance)
    truth, drop = cfs(model.double(), _double(inputs), CASES[name].sites(model), 1, HEADS, CASES[name].outcome, GRID)
    clear = (drop > 3e-5)[:, :, None].expand_as(truth).numpy()
    np.testing.assert_allclose(a[:, 0][clear], truth.numpy()[clear], atol=tolerance)


def _double(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("layer", [0, 2])
def test_last_token_outcome(layer):
    assert agrees(build("gpt2"), batch("gpt2"), "gpt2", layer, "last")


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", CASES)
def test_what_was_captured_never_runs_again(name, layer, monkeypatch):
    """Blocks before the site, embeddings, the site's own attention and a parallel MLP: once per input, not per row."""
    model, inputs = build(name), batch(name)
    body = anatomy(model)
    if len({entry.block for entry in body.layers}) < LAYERS:
        pytest.skip("a shared block does run again, as another layer")
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    once = {m for entry in body.layers[:layer] for m in entry.block.modules() if m in linear}
    here = body.layers[layer]
    once |= {m for m in here.attention.modules() if m in linear and m is not here.site}
    if here.beside is not None:
        once |= {m for m in here.beside.modules() if m in linear}
    starts = {m for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv2d)}
    once |= starts
    calls = dict.fromkeys(once, 0)
    for kind in {type(m) for m in once}:
        monkeypatch.setattr(kind, "forward", _counting(kind.forward, calls))
    measure(model, inputs, layers=layer, search="grid:4", batch_size=4)
    assert len(calls) > 1
    assert {calls[m] for m in once - starts} <= {1}
    assert {calls[m] for m in starts} == {2}  # and once before all, to see how many tokens there are


def _counting(forward, calls):
    def counted(self, *args, **kwargs):
        if self in calls:
            calls[self] += 1
        return forward(self, *args, **kwargs)

    return counted


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "llama"])
def test_only_tokens_that_are_read_pass_the_last_mlp(name, layer):
    model, inputs = build(name), batch(name)
    if CASES[name].outcome == "next":
        inputs["positions"] = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
        inputs["positions"][:, 3] = True
    block = anatomy(model).layers[-1].block
    linears = [m for n, m in block.named_modules() if n.rpartition(".")[2] in ("fc1", "c_fc", "up_proj", "dense")]
    mlp = linears[-2] if name == "bert" else linears[-1]  # attention's dense, intermediate, output
    tokens = []
    handle = mlp.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:-1].numel()))
    run = measure(model, inputs, layers=layer, search="grid:4", batch_size=4)
    handle.remove()
    dense = inputs.get("input_ids", torch.zeros(4, 5)).numel()
    distributions = {"vit": 4, "bert": 4 + 3, "gpt2": 4, "llama": 4}[name]
    rows = run.attrs["evaluations"] / 4
    # The capture runs all tokens once; every row runs its own outcome tokens, no others.
    assert sum(tokens) == dense + distributions * rows


def test_heads_that_pool_read_all_tokens():
    expected = {"vit": [0], "deit-distilled": [0, 1], "dinov2": [0, 1, 2, 3, 4], "bert-classes": [0]}
    for name, tokens in expected.items():
        model, inputs = build(name), batch(name)
        body = anatomy(model)
        with opened(model):
            taken = capture(body, inputs, [0])
            mask = tokens_read(body, taken.final, ids=inputs.get("input_ids"))
        assert mask[0].nonzero().flatten().tolist() == tokens, name
        assert bool((mask == mask[0]).all())


def test_a_classifier_on_the_last_token_reads_each_inputs_own():
    model, inputs = build("gpt2-classes"), batch("gpt2-classes")
    body = anatomy(model)
    with opened(model):
        taken = capture(body, inputs, [0])
        mask = tokens_read(body, taken.final, ids=inputs["input_ids"])
    assert mask.nonzero()[:, 1].tolist() == [8, 5, 8, 8]


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [m.training for m in model.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), m.__dict__.get("forward")) for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [p.data_ptr() for p in model.parameters()],
        torch.get_rng_state(),
        torch.is_grad_enabled(),
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ending", ["success", "exception"])
@pytest.mark.parametrize("name", ["vit", "albert", "gpt_neox"])
def test_the_model_is_as_before(name, ending, dtype):
    model, inputs = build(name, dtype), batch(name, dtype=dtype)
    model.train()
    block = anatomy(model).layers[-1].block
    original = type(block).forward
    model.get_parameter(next(n for n, _ in model.named_parameters())).grad = None
    next(p for p in model.parameters() if p.requires_grad).grad = torch.ones_like(next(model.parameters()))
    # As accelerate does it: a forward in the instance's own dictionary.
    block.forward = lambda *args, **kwargs: original(block, *args, **kwargs)
    before = state_of(model)
    if ending == "success":
        run = measure(model, inputs, layers="all", search="grid:3")
        assert "training" not in run.attrs
    else:

        class Oops(Exception):
            pass

        def fail(_done, _total):
            raise Oops

        with pytest.raises(Oops):
            measure(model, inputs, layers="all", search="grid:3", progress=fail)
    assert same(before, state_of(model))


def test_training_mode_is_measured_in_evaluation_mode():
    model, inputs = build("bert"), batch("bert")
    calm = measure(model, inputs, layers=0, search="grid:3")
    model.train()
    assert model.config.hidden_dropout_prob > 0
    excited = measure(model, inputs, layers=0, search="grid:3")
    np.testing.assert_array_equal(calm["drop"].values, excited["drop"].values)
    assert model.training


def test_half_precision_is_resumed_in_float32():
    exact = build("gpt2", torch.float32)
    half = build("gpt2", torch.float32).to(torch.bfloat16)
    exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    inputs = batch("gpt2")
    truth = measure(exact, inputs, layers=2, search="grid:4", threshold=1e-4)
    raised = measure(half, inputs, layers=2, search="grid:4", threshold=1e-4)
    native = measure(half, inputs, layers=2, search="grid:4", threshold=1e-4, dtype="bfloat16")
    assert (raised.attrs["dtype"], raised.attrs["captured"]) == ("float32", "bfloat16")
    assert 0 < float(raised["noise"].max()) < 1e-9
    # In bfloat16 the noise is far larger and raises the threshold by itself.
    assert float(native["noise"].max()) > 100 * float(raised["noise"].max())
    invalid = native["drop"].values <= np.maximum(1e-4, 100 * native["noise"].values[..., None])
    row = np.isnan(native["substitutability"].values).all(-1)
    np.testing.assert_array_equal(row, invalid)
    both = np.isfinite(truth["substitutability"].values) & np.isfinite(raised["substitutability"].values)
    difference = np.abs(truth["substitutability"].values - raised["substitutability"].values)[both]
    assert both.mean() > 0.5
    assert np.median(difference) < 0.02


def test_data_parallel_compiled_and_peft_wrappers():
    from peft import LoraConfig, get_peft_model

    plain, inputs = build("llama"), batch("llama")
    truth = measure(plain, inputs, layers=1, search="grid:4")
    for wrapped in (nn.DataParallel(plain), torch.compile(plain, backend="eager")):
        found = measure(wrapped, inputs, layers=1, search="grid:4")
        np.testing.assert_allclose(found["substitutability"].values, truth["substitutability"].values, atol=1e-9)
    plain.compile(backend="eager")  # compiled in place
    found = measure(plain, inputs, layers=1, search="grid:4")
    np.testing.assert_allclose(found["substitutability"].values, truth["substitutability"].values, atol=1e-9)

    model = build("llama")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    tuned = tuned.double().eval()
    sites = [layer.self_attn.o_proj for layer in tuned.get_base_model().model.layers]
    run = measure(tuned, inputs, layers=1, search="grid:4", threshold=1e-12)
    expected, _ = cfs(tuned.get_base_model(), inputs, sites, 1, HEADS, "next", GRID)
    np.testing.assert_allclose(run["substitutability"].values[:, 0], expected.numpy(), atol=1e-6)
    assert not np.allclose(run["drop"].values, truth["drop"].values, rtol=1e-3)


def test_sharded_and_activation_quantized_models_are_refused():
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(us.UnderstudyError, match="keeps only pieces of its weights"):
        measure(FullyShardedDataParallel(), {})

    class Rounded(nn.Linear):
        def forward(self, x):
            return super().forward(torch.round(x * 4) / 4)

    model, inputs = build("gpt2-classes"), batch("gpt2-classes")
    quantized = build("llama", torch.float32)
    old = quantized.model.layers[1].self_attn.o_proj
    new = Rounded(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    quantized.model.layers[1].self_attn.o_proj = new
    with pytest.raises(us.UnderstudyError, match=r"layer 1 \(Rounded\) is not a linear map"):
        measure(quantized, batch("llama"), layers=1, search="grid:3")
    assert measure(model, inputs, layers=1, search="grid:3").sizes["input"] == 4


def test_gated_runs_and_generates_under_an_intervention():
    model, inputs = build("gpt2"), batch("gpt2")
    sites = CASES["gpt2"].sites(model)
    from naive import gate_site

    gates = torch.tensor([1.0, 0.0, 1.0, 1.6])
    with gate_site(sites, 2, HEADS, gates):
        truth = forward_logits(model, inputs)
    with us.gated(model, {(-1, 1): 0.0, (2, 3): 1.6}) as same_model:
        assert same_model is model
        assert torch.allclose(forward_logits(model, inputs), truth, atol=1e-12)
        tokens = model.generate(inputs["input_ids"][:1], max_new_tokens=5, do_sample=False)
    plain = model.generate(inputs["input_ids"][:1], max_new_tokens=5, do_sample=False)
    assert tokens.shape == (1, 14)
    assert not torch.equal(forward_logits(model, inputs), truth)
    # Every generated token is the argmax of a full forward under the same gates.
    with us.gated(model, {(-1, 1): 0.0, (2, 3): 1.6}), torch.no_grad():
        again = model(tokens[:, :-1]).logits.argmax(-1)
    assert torch.equal(again[:, 8:], tokens[:, 9:])
    assert plain.shape == tokens.shape


def test_gated_tells_the_applications_of_a_shared_block_apart_even_after_an_exception():
    model, inputs = build("albert"), batch("albert")
    sites = CASES["albert"].sites(model)
    from naive import gate_site

    with gate_site(sites, 1, HEADS, torch.tensor([0.0, 1, 1, 1])):
        truth = forward_logits(model, inputs)
    with us.gated(model, {(1, 0): 0.0}):
        with suppress(KeyError), model.albert.encoder.albert_layer_groups[0].register_forward_hook(_raise):
            forward_logits(model, inputs)
        assert torch.allclose(forward_logits(model, inputs), truth, atol=1e-12)


def _raise(*_):
    raise KeyError


def test_gates_that_never_fire_and_gates_that_are_not_there():
    model = build("vit")
    with (
        pytest.raises(us.UnderstudyError, match="Gates were set at layer 1, but no forward"),
        us.gated(model, {(1, 0): 0}),
    ):
        pass
    with (
        pytest.raises(us.UnderstudyError, match="Unit 4 is not there: layer 2 has 4 heads, 0 to 3"),
        us.gated(model, {(-1, 4): 0}),
    ):
        pass
    with (
        pytest.raises(us.UnderstudyError, match=r"Layer 3 is not there: .* has 3 layers, 0 to 2"),
        us.gated(model, {(3, 0): 0}),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 30.0])
def test_the_divergence_equals_its_definition(scale, dtype):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(6, 150, generator=generator, dtype=torch.float64) * 3
    other = dense + scale * torch.randn(6, 150, generator=generator, dtype=torch.float64)
    dense, other = dense.to(dtype), other.to(dtype)
    truth = divergence.kl_plain(dense, other)
    found = divergence.kl(dense, divergence.probabilities(dense), other.clone())
    # Of the rounding of float32 logits themselves, only what the difference of the logits keeps is left.
    # The definition itself cancels: it is a difference of logarithms of size one.
    tolerance = {1e-4: 1e-6}.get(scale, 1e-9) if dtype == torch.float64 else {1e-4: 2e-2}.get(scale, 1e-4)
    assert torch.allclose(found, truth, rtol=tolerance, atol=0)
    far = torch.tensor([[0.0, 0.0, 200.0]], dtype=dtype)
    gone = torch.tensor([[200.0, 0.0, 0.0]], dtype=dtype)
    assert divergence.kl(far, divergence.probabilities(far), gone.clone()).item() == pytest.approx(200.0)
    assert divergence.kl(far, divergence.probabilities(far), gone * torch.nan).isnan().all()


def test_one_text_less_may_again_be_as_many_inputs_as_tokens():
    """Four texts, the last of four tokens, the others of three: without it, three inputs of three tokens."""
    lengths = (3, 3, 3, 4)

    def load(indices):
        longest = max(lengths[index] for index in indices)
        mask = torch.tensor([[int(t < lengths[index]) for t in range(longest)] for index in indices])
        ids = torch.tensor([[7 + (index + t) % 50 for t in range(longest)] for index in indices])
        return {"input_ids": ids, "attention_mask": mask}

    inputs = us.Inputs(tuple("abcd"), load)
    model = build("llama")
    together = measure(model, inputs, layers=1, search="grid:3", batch_size=4)
    alone = measure(model, inputs, layers=1, search="grid:3", batch_size=1)
    np.testing.assert_allclose(together["drop"].values, alone["drop"].values, rtol=1e-4)
    cut = batches(inputs, range(4), most=4, bytes_each=lambda _: 1, budget=2**30, tokens=None)
    shapes = [tuple(given["input_ids"].shape) for _, given in cut]
    assert all(count != tokens for count, tokens in shapes if count > 1)
    assert sum(count for count, _ in shapes) == 4
