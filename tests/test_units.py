"""Units beyond heads, and pairs across layers, against full forwards with gates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import understudy as us
from families import CASES, HEADS, batch, build
from naive import cfs, divergence, forward_logits, gate_site, positions
from understudy import UnderstudyError as Error
from understudy.anatomy import anatomy
from understudy.lens.cross import across

GRID = torch.linspace(0, 3, 4, dtype=torch.float64)
GROUPED = [name for name in CASES if name.split("-")[0] in ("llama", "mistral", "qwen2", "qwen3", "gemma")]


@pytest.mark.parametrize("name", list(CASES))
def test_blocks_of_neurons_resume_as_they_run(name):
    for layer in us.check(build(name), batch(name), units="neurons:4"):
        assert layer.passed, layer


@pytest.mark.parametrize("name", ["vit", "bert", "albert", "distilbert", "gpt2", "gpt_neox", "llama", "dinov2"])
@pytest.mark.parametrize("layer", [0, 2])
def test_neurons_equal_the_naive_measurement(name, layer):
    model, given = build(name), batch(name)
    run = us.measure(model, given, layers=layer, units="neurons:4", search="grid:4", threshold=1e-12)
    sites = [entry.site for entry in anatomy(model).cut("neurons:4").sites]
    truth, drop = cfs(model, given, sites, layer, 4, CASES[name].outcome, GRID)
    np.testing.assert_allclose(run["drop"].values[:, 0], drop.numpy(), rtol=1e-5)
    np.testing.assert_allclose(run["substitutability"].values[:, 0], truth.numpy(), atol=1e-6)
    assert run.attrs["units"] == "neurons:4"


@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_share_keys_and_values(name):
    model, given = build(name), batch(name)
    groups = model.config.num_key_value_heads
    assert 1 < groups < HEADS
    for layer in us.check(model, given, units="kv"):
        assert layer.passed, layer
    run = us.measure(model, given, layers=1, units="kv", search="grid:4", threshold=1e-12)
    truth, _ = cfs(model, given, CASES[name].sites(model), 1, groups, CASES[name].outcome, GRID)
    np.testing.assert_allclose(run["substitutability"].values[:, 0], truth.numpy(), atol=1e-6)


def test_refine_and_gates_take_other_units_too():
    model, inputs = us.load("stdlib"), us.stdlib(2, length=24)
    exact = us.measure(model, inputs, units="neurons:4", search="grid:301")
    found = us.measure(model, inputs, units="neurons:4")
    np.testing.assert_allclose(found["substitutability"].values, exact["substitutability"].values, atol=2e-3)
    before = model(**inputs.batch([0])).logits
    with us.gated(model, {(-1, 3): 0.0}, units="neurons:4"):
        assert not torch.equal(model(**inputs.batch([0])).logits, before)
    assert us.plan(model, inputs, units="neurons:4", rate=1e11).units == 4
    assert us.summary(found).loc["all", "inputs"] == 2


def test_units_that_a_model_does_not_have():
    with pytest.raises(Error, match="units='kv' needs query heads that share keys and values, but GPT-2 has none"):
        us.measure(build("gpt2"), batch("gpt2"), units="kv")
    with pytest.raises(Error, match="cannot be cut into 7 equal blocks: choose a divisor"):
        us.measure(build("gpt2"), batch("gpt2"), units="neurons:7")
    for units in ("neurons", "neurons:0", "neurons:x", "experts"):
        with pytest.raises(Error, match="the units that can be gated are 'heads', 'kv' and 'neurons:N'"):
            us.measure(build("gpt2"), batch("gpt2"), units=units)


@pytest.mark.parametrize("name", ["vit", "gpt2", "llama", "bert"])
def test_pairs_across_layers_equal_the_naive_measurement(name):
    model, given = build(name), batch(name)
    run = across(model, given, source=0, substitutes=[1, -1], search="grid:4", threshold=1e-12)
    assert run["substitute_layer"].values.tolist() == [1, 2]
    sites, dense = CASES[name].sites(model), forward_logits(model, given)
    where = positions(given, CASES[name].outcome)
    for at, layer in enumerate((1, 2)):
        for i, j in ((0, 0), (1, 3), (3, 2)):
            gates = torch.ones(HEADS)
            gates[i] = 0
            with gate_site(sites, 0, HEADS, gates):
                drop = divergence(dense, forward_logits(model, given), where)
            least = drop
            for alpha in GRID.tolist():
                other = torch.ones(HEADS, dtype=torch.float64)
                other[j] = alpha
                with gate_site(sites, 0, HEADS, gates), gate_site(sites, layer, HEADS, other):
                    least = torch.minimum(least, divergence(dense, forward_logits(model, given), where))
            truth = (1 - least / drop).numpy()
            np.testing.assert_allclose(run["substitutability"].values[:, at, i, j], truth, atol=1e-6)


def test_across_layers_wrong_uses():
    model, given = build("vit"), batch("vit")
    with pytest.raises(Error, match="Substitutes come after the source's layer 1"):
        across(model, given, source=1, substitutes=[1])
    with pytest.raises(Error, match="starts from slopes within a layer"):
        across(model, given, source=0, substitutes=[1], search="refine")
    with pytest.raises(Error, match="Across layers, units are 'heads' or 'kv'"):
        across(model, given, source=0, substitutes=[1], units="neurons:4")
