"""Models and surroundings as people have them: hooks, flags, wrappers, offloading, precision contexts."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import understudy as us
from families import CASES, HEADS, batch, build
from naive import cfs, forward_logits
from understudy import divergence
from understudy.measurement import measure

GRID = torch.linspace(0, 3, 4, dtype=torch.float64)
Error = us.UnderstudyError


def worst(model, inputs, name, layer, outcome=None, truth_model=None, **options):
    run = measure(model, inputs, layers=layer, search="grid:4", threshold=1e-12, outcome=outcome or "auto", **options)
    base = truth_model or model
    truth, _ = cfs(base, inputs, CASES[name].sites(base), layer, HEADS, outcome or CASES[name].outcome, GRID)
    found = torch.from_numpy(run["substitutability"].values[:, 0]).double()
    assert torch.equal(found.isnan(), truth.isnan())
    return float((found - truth).nan_to_num().abs().max())


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", ["llama", "vit", "bert", "gpt_neox"])
@pytest.mark.parametrize("where", ["block", "block input", "attention", "site", "mlp"])
def test_the_users_own_hooks_act_once(name, layer, where):
    model, inputs = build(name), batch(name)
    from understudy.anatomy import anatomy

    body = anatomy(model)
    here = body.layers[2]
    push = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def after(_module, _args, output):
        return (output[0] + push, *output[1:]) if isinstance(output, tuple) else output + push

    if where == "block":
        here.block.register_forward_hook(after)
    elif where == "block input":
        here.block.register_forward_pre_hook(lambda _, args: (args[0] + push, *args[1:]))
    elif where == "attention":
        here.attention.register_forward_hook(after)
    elif where == "site":
        here.site.register_forward_hook(lambda _module, _args, output: 2 * output)
    else:
        mlp = next(m for n, m in here.block.named_modules() if n in ("mlp", "output"))
        mlp.register_forward_hook(after)
    assert worst(model, inputs, name, layer) <= 1e-6


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", {"return_dict": False}),
        ("vit", {"return_dict": False}),
        ("gpt2", {"output_hidden_states": True, "use_cache": True}),
        ("bert", {"chunk_size_feed_forward": 3}),
        ("distilbert", {"chunk_size_feed_forward": 3}),
        ("albert", {"chunk_size_feed_forward": 3}),
    ],
)
def test_flags_of_a_config(name, flags):
    from understudy.anatomy import anatomy

    plain, inputs = build(name), batch(name)
    truth = measure(plain, inputs, layers=1, search="grid:4")
    model = build(name)
    for key, value in flags.items():
        setattr(model.config, key, value)
    for module in model.modules():
        if hasattr(module, "chunk_size_feed_forward"):
            module.chunk_size_feed_forward = flags.get("chunk_size_feed_forward", 0)
    before = dict(vars(model.config))
    hooks = [len(m._forward_hooks) for m in model.modules()]
    found = measure(model, inputs, layers=1, search="grid:4")
    np.testing.assert_allclose(found["substitutability"].values, truth["substitutability"].values, atol=1e-9)
    assert dict(vars(model.config)) == before
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert anatomy(model).layers[0].units == HEADS


@pytest.mark.parametrize("name", ["gpt2-classes", "llama-classes"])
def test_a_classifier_without_a_padding_token(name):
    model, inputs = build(name), batch(name)
    inputs = {"input_ids": inputs["input_ids"].clamp(min=6)}
    truth = [worst(build(name), {"input_ids": inputs["input_ids"][:1]}, name, 1)]
    padded = measure(model, inputs, layers=1, search="grid:4")
    model.config.pad_token_id = None
    found = measure(model, inputs, layers=1, search="grid:4")
    assert truth[0] <= 1e-6
    np.testing.assert_allclose(found["drop"].values, padded["drop"].values, rtol=1e-6)
    assert model.config.pad_token_id is None


def test_inference_mode_and_autocast_around_it():
    model, inputs = build("vit", torch.float32), batch("vit", dtype=torch.float32)
    truth = measure(model, inputs, search="grid:4")["drop"].values
    with torch.inference_mode():
        np.testing.assert_array_equal(measure(model, inputs, search="grid:4")["drop"].values, truth)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(measure(model, inputs, search="grid:4")["drop"].values, truth)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights(place, tmp_path):
    from accelerate import cpu_offload, disk_offload

    model, inputs = build("llama", torch.float32), batch("llama")
    truth = measure(model, inputs, layers="all", search="grid:4")
    away = build("llama", torch.float32)
    if place == "cpu":
        cpu_offload(away, execution_device=torch.device("cpu"))
    else:
        disk_offload(away, tmp_path / "weights", execution_device=torch.device("cpu"))
    forwards = [m.__dict__.get("forward") for m in away.modules()]
    found = measure(away, inputs, layers="all", search="grid:4")
    np.testing.assert_allclose(found["substitutability"].values, truth["substitutability"].values, atol=1e-3)
    assert found.attrs["model_hash"] == truth.attrs["model_hash"]
    assert forwards == [m.__dict__.get("forward") for m in away.modules()]
    with pytest.raises(Error, match="dtype='float64' cannot be used with offloaded weights"):
        measure(away, inputs, dtype="float64")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_really_quantized_models_are_refused():
    model = torch.ao.quantization.quantize_dynamic(build("llama", torch.float32), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(Error, match=r"output projection of layer 2 .* is not a linear map"):
        measure(model, batch("llama"), search="grid:3")


def test_prompt_tuning_is_refused_and_adapters_are_part_of_the_identity():
    from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model

    prompted = get_peft_model(build("llama"), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))
    with pytest.raises(Error, match="Prompt and prefix tuning add tokens"):
        measure(prompted, batch("llama"))
    tuned = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)).double()
    acting = measure(tuned, batch("llama"), search="grid:3")
    with tuned.disable_adapter():
        resting = measure(tuned, batch("llama"), search="grid:3")
    assert acting.attrs["identity"] != resting.attrs["identity"]
    assert not np.allclose(acting["drop"].values, resting["drop"].values)


def test_the_config_is_part_of_the_identity(tmp_path):
    model, inputs = build("gpt2"), batch("gpt2")
    measure(model, inputs, search="grid:3", out=tmp_path / "run.zarr")
    model.config.n_head = 8
    with pytest.raises(Error, match="other settings"):
        measure(model, inputs, search="grid:3", out=tmp_path / "run.zarr")


def test_gated_acts_on_a_model_that_was_compiled_and_has_run():
    model, inputs = build("gpt2"), batch("gpt2")
    compiled = torch.compile(model, backend="eager")
    plain = forward_logits(compiled, inputs)
    with us.gated(compiled, {(1, 0): 0.0}):
        gated = forward_logits(compiled, inputs)
    with us.gated(model, {(1, 0): 0.0}):
        truth = forward_logits(model, inputs)
    assert torch.allclose(gated, truth)
    assert not torch.allclose(gated, plain)


@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0, 100.0])
def test_a_shift_common_to_all_logits_costs_no_digits(shift):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(4, 5000, generator=generator).double() * 2
    other = dense + 0.01 * torch.randn(4, 5000, generator=generator).double()
    truth = divergence.kl_plain(dense, other)
    # What float32 keeps of logits of that size is all that may be lost.
    kept = (other + shift).float()
    found = divergence.kl(dense.float(), divergence.probabilities(dense.float()), kept)
    assert torch.allclose(found, truth, rtol=1e-3 * max(1.0, shift / 30), atol=0)


def test_other_kinds_of_attention_and_arguments():
    model, inputs = build("llama"), batch("llama")
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    inputs["labels"] = inputs["input_ids"]
    assert worst(model, inputs, "llama", 0) <= 1e-6
    typed = {**batch("bert"), "token_type_ids": torch.randint(0, 2, (4, 9))}
    assert worst(build("bert"), typed, "bert", 0) <= 1e-6
    eager = build("gpt2")
    eager.set_attn_implementation("eager")
    assert worst(eager, batch("gpt2"), "gpt2", 0) <= 1e-6


def test_a_dead_head_reads_everything():
    model, inputs = build("distilbert-classes"), batch("distilbert-classes")
    model.pre_classifier.bias.data.fill_(-1e6)
    run = measure(model, inputs, layers=1, search="grid:3")
    assert np.isnan(run["substitutability"].values).all()
    assert (run["drop"].values == 0).all()


def test_long_and_short_texts_stay_within_the_budget(monkeypatch):
    from understudy import worker

    sizes = []
    right = worker.capture
    monkeypatch.setattr(worker, "capture", lambda b, x, y: sizes.append(tuple(x["input_ids"].shape)) or right(b, x, y))
    lengths = [2] + [30] * 20 + [3] * 20

    def load(indices):
        longest = max(lengths[i] for i in indices)
        ids = torch.full((len(indices), longest), 7)
        mask = torch.tensor([[int(t < lengths[i]) for t in range(longest)] for i in indices])
        return {"input_ids": ids, "attention_mask": mask}

    budget = 2**18
    measure(build("gpt2", torch.float32), us.Inputs(tuple(map(str, range(41))), load), search="grid:2", budget=budget)
    assert sum(count for count, _ in sizes) == 41
    assert all(count == 1 or 4 * count * tokens * 3 * 32 <= budget // 4 for count, tokens in sizes)
    assert all(count != tokens for count, tokens in sizes if count > 1)


def test_noise_that_raises_the_threshold_is_said(caplog):
    model = build("gpt2", torch.float32).to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        measure(model, batch("gpt2"), search="grid:2", dtype="bfloat16")
    assert "raises their threshold above 1e-05" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device='gpu' is not one that torch knows"),
        ({"device": "cuda"}, "device='cuda' cannot be used here"),
        ({"out": "."}, "is not a run"),
        ({"layers": 1.5}, "A layer is a whole number, but 1.5 was given"),
        ({"layers": ["a"]}, "A layer is a whole number, but 'a' was given"),
        ({"layers": True}, "A layer is a whole number, but True was given"),
        ({"search": 31}, "Search 31 is not known"),
        ({"search": "grid:²"}, "Search 'grid:²' is not known"),
        ({"budget": -1}, "budget must be a number of bytes above 0"),
    ],
)
def test_more_wrong_options(options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Error, match=message):
        measure(build("vit", torch.float32), batch("vit", dtype=torch.float32), **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pixel_values": torch.zeros(2, 1, 8, 8), "flag": True}, "but flag is a bool"),
        ({"pixel_values": [1, 2]}, "but pixel_values is a list"),
        ({"pixel_values": torch.tensor(1.0)}, "but pixel_values is a single number"),
        (
            {"pixel_values": torch.zeros(2, 1, 8, 8), "positions": torch.ones(2, 5)},
            "classes are not predicted at positions",
        ),
        (
            {"pixel_values": torch.zeros(2, 1, 8, 8), "encoder_hidden_states": torch.ones(2, 5)},
            "cross-attention cannot be",
        ),
    ],
)
def test_more_wrong_inputs(inputs, message):
    with pytest.raises(Error, match=message):
        measure(build("vit", torch.float32), inputs)


def test_a_gate_needs_a_layer_and_a_unit():
    with (
        pytest.raises(Error, match=r"A gate is set by \(layer, unit\), such as \(-1, 3\), but 3 was given"),
        us.gated(build("vit"), {3: 0.0}),
    ):
        pass
