"""The engine against naive full forwards, for every family."""

from __future__ import annotations

import pytest
import torch

from families import CASES, HEADS, LAYERS, batch, build
from naive import cfs, forward_logits, gate_site, positions
from understudy.anatomy import anatomy
from understudy.capture import capture
from understudy.measurement import measure
from understudy.outcome import reads
from understudy.resume import Suffix
from understudy.surgery import opened


def suffix_logits(name, model, inputs, layer, gates, later=None, budget=2**30):
    body = anatomy(model)
    with opened(model):
        taken = capture(body, inputs, [layer])
        read = reads(body, taken, CASES[name].outcome, [str(i) for i in range(taken.count)])
        suffix = Suffix(body, taken, layer, read, dtype=body.dtype, budget=budget)
        owner = torch.arange(taken.count)
        hidden = suffix.states(gates.to(body.dtype), owner, later or {})
        return suffix._logits(hidden)


def full_logits(name, model, inputs):
    logits = forward_logits(model, inputs)
    where = positions(inputs, CASES[name].outcome)
    return logits if where is None else logits[where]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", CASES)
def test_resumed_equals_full(name, layer, dtype):
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}[dtype]
    model, inputs = build(name, dtype), batch(name, dtype=dtype)
    ones = torch.ones(4, HEADS)
    dense = full_logits(name, model, inputs)
    assert (suffix_logits(name, model, inputs, layer, ones) - dense).abs().max() <= tolerance

    sites = CASES[name].sites(model)
    gates = torch.rand(HEADS, generator=torch.Generator().manual_seed(layer)) * 3
    with gate_site(sites, layer, HEADS, gates):
        full = full_logits(name, model, inputs)
    resumed = suffix_logits(name, model, inputs, layer, gates.expand(4, -1))
    assert (full - dense).abs().max() > 1e-3, "the gates change nothing: this proves nothing"
    assert (resumed - full).abs().max() <= tolerance
    # Without room for contributions the projection's input is gated instead.
    small = suffix_logits(name, model, inputs, layer, gates.expand(4, -1), budget=1)
    assert (small - full).abs().max() <= tolerance


@pytest.mark.parametrize("name", CASES)
def test_gates_at_several_sites(name):
    model, inputs = build(name), batch(name)
    sites = CASES[name].sites(model)
    gates = torch.rand(LAYERS, HEADS, generator=torch.Generator().manual_seed(3)) * 2
    with (
        gate_site(sites, 0, HEADS, gates[0]),
        gate_site(sites, 1, HEADS, gates[1]),
        gate_site(sites, 2, HEADS, gates[2]),
    ):
        full = full_logits(name, model, inputs)
    later = {layer: gates[layer].expand(4, -1).double() for layer in (1, 2)}
    assert (suffix_logits(name, model, inputs, 0, gates[0].expand(4, -1), later) - full).abs().max() <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_substitutability_equals_the_definition(name):
    model, inputs = build(name), batch(name)
    layer = {"vit": 2, "bert": 2, "albert": 0, "gpt2": 2, "llama": 2}.get(name, 1)
    run = measure(model, inputs, layers=layer, search="grid:5", threshold=1e-12)
    alphas = torch.linspace(0, 3, 5, dtype=torch.float64)
    truth, drop = cfs(model, inputs, CASES[name].sites(model), layer, HEADS, CASES[name].outcome, alphas)
    assert (drop > 1e-5).all()
    found = torch.from_numpy(run["substitutability"].values[:, 0]).double()
    assert torch.equal(found.isnan(), truth.isnan())
    assert (found - truth).nan_to_num().abs().max() <= 1e-6
    assert torch.allclose(torch.from_numpy(run["drop"].values[:, 0]).double(), drop, rtol=1e-6)
