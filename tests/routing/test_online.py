"""Routing while the model runs: the same numbers by both executions, the same heads as offline, the model untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import understudy as us
from families import HEADS, LAYERS, batch, build
from naive import forward_logits
from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError
from understudy.identity import fingerprint
from understudy.outcome import resolve
from understudy.routing import online
from understudy.routing.compact import CompactAttention
from understudy.routing.lesson import summaries
from understudy.routing.network import RouterNetwork
from understudy.routing.online import routed
from understudy.routing.residual import places, summarize
from understudy.routing.router import Card, Router


def random_router(model, inputs, layer, seed=0):
    """A router of random weights that tells these inputs apart."""
    torch.manual_seed(seed + 100 * layer)
    z, body = summaries(model, us.Inputs.of(inputs), layer=layer), anatomy(model)
    network = RouterNetwork(z.shape[1], HEADS).eval()
    with torch.no_grad():
        network.mean.copy_(z.mean(0))
        network.scale.copy_(z.std(0) + 1e-3)
        network.encoder[-1].weight *= 10
        network.heads.weight *= 10
    width, outcome = z.shape[1] // 3, resolve(body, "auto")
    return Router(network, Card(body.name, fingerprint(body), layer, HEADS, width, outcome, (2,), "R1", seed))


def every_layer(model, inputs):
    return [random_router(model, inputs, layer) for layer in range(LAYERS)]


def run(model, inputs, routers, **options):
    with routed(model, routers, **options) as chosen:
        logits = forward_logits(model, inputs)
    return logits, chosen


def same(found, truth, tolerance=1e-10):
    assert (found - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.fixture
def compact_calls(monkeypatch):
    """The layers whose kept heads were run alone."""
    layers, whole = [], CompactAttention.run

    def counted(self, *args, **kwargs):
        layers.append(self.layer.index)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(CompactAttention, "run", counted)
    return layers


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2", "gpt2", "gpt2-classes"])
def test_compact_equals_gated(name, compact_calls):
    model, inputs = build(name), batch(name, 6)  # texts are padded on both sides
    routers = every_layer(model, inputs)
    for keep in (1, 2, 3, HEADS, {0: 1, 1: 3, -1: 2}):
        compact, by_compact = run(model, inputs, routers, keep=keep, execution="compact")
        assert compact_calls == [0, 1, 2]
        gated, by_gated = run(model, inputs, routers, keep=keep, execution="gated")
        assert compact_calls == [0, 1, 2]
        auto, _ = run(model, inputs, routers, keep=keep)
        assert compact_calls == [0, 1, 2, 0, 1, 2]
        compact_calls.clear()
        same(compact, gated)
        assert torch.equal(auto, compact)
        for layer in range(LAYERS):
            masks = by_compact.of(layer)
            assert torch.equal(masks, by_gated.of(layer))
            assert masks.sum(-1).tolist() == [keep if isinstance(keep, int) else (1, 3, 2)[layer]] * 6
        if keep == 2:  # inputs are told apart
            assert any(len(by_compact.of(layer).unique(dim=0)) > 1 for layer in range(LAYERS))
        if keep == HEADS:
            same(compact, forward_logits(model, inputs))


@pytest.mark.parametrize("execution", ["compact", "gated"])
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_online_masks_are_the_offline_ones(name, execution):
    model, inputs = build(name, torch.float32), batch(name, 6, dtype=torch.float32)
    router = random_router(model, inputs, 1)
    logits, chosen = run(model, inputs, router, keep=2, execution=execution)
    offline = router.choose(summaries(model, us.Inputs.of(inputs), layer=1), 2)
    assert torch.equal(chosen.of(1), offline)
    assert len(offline.unique(dim=0)) > 1
    for at in range(6):  # and the heads that go are gates of zero
        with us.gated(model, {(1, unit): float(offline[at, unit]) for unit in range(HEADS)}):
            alone = forward_logits(model, {key: value[at : at + 1] for key, value in inputs.items()})
        real = inputs["attention_mask"][at].bool() if "attention_mask" in inputs else ...
        assert torch.allclose(alone[0][real], logits[at][real], atol=1e-4)


@pytest.mark.parametrize("execution", ["compact", "gated"])
def test_a_router_sees_what_the_routed_layers_before_it_left(execution):
    model, inputs = build("vit"), batch("vit")
    routers, residuals = [random_router(model, inputs, 2), random_router(model, inputs, 0)], []
    with model.vit.layers[2].register_forward_pre_hook(lambda _block, args: residuals.append(args[0])):
        _, chosen = run(model, inputs, routers, keep={0: 1, 2: 2}, execution=execution)
        forward_logits(model, inputs)
    body = anatomy(model)
    routed_z, dense_z = (summarize(x, places(body, inputs, "classes", x.shape[1])) for x in residuals)
    assert not torch.allclose(routed_z, dense_z)
    assert torch.equal(chosen.of(2), routers[0].choose(routed_z, 2))
    assert set(chosen.masks) == {0, 2}


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_one_inside_the_other(name):
    model, inputs = build(name), batch(name)
    routers = every_layer(model, inputs)
    with routed(model, routers[:1], keep=2), routed(model, routers[1:], keep=3, execution="gated"):
        assert fingerprint(anatomy(model)) == routers[0].card.model_hash  # still the model that it was
        found = forward_logits(model, inputs)
    same(found, run(model, inputs, routers, keep={0: 2, 1: 3, 2: 3})[0])
    with pytest.raises(UnderstudyError, match="no forward of the model ran there"):  # noqa: SIM117
        with routed(model, routers[0], keep=2), routed(model, routers[0], keep=3):
            forward_logits(model, inputs)


def test_masks_of_several_batches_are_put_in_a_row():
    model, inputs = build("vit"), batch("vit", 6)
    router = random_router(model, inputs, 0)
    with routed(model, router, keep=2) as chosen:
        for part in (slice(0, 4), slice(4, 6)):
            forward_logits(model, {key: value[part] for key, value in inputs.items()})
    assert [len(mask) for mask in chosen.masks[0]] == [4, 2]
    assert torch.equal(chosen.of(0), run(model, inputs, router, keep=2)[1].of(0))


def test_each_forward_is_summed_up_and_chosen_for_once(monkeypatch):
    model, inputs = build("vit"), batch("vit")
    counts = {"places": 0, "summarize": 0}

    def counted(name):
        whole = getattr(online, name)

        def call(*args):
            counts[name] += 1
            return whole(*args)

        return call

    for name in counts:
        monkeypatch.setattr(online, name, counted(name))
    run(model, inputs, every_layer(model, inputs), keep=2)
    assert counts == {"places": 1, "summarize": LAYERS}


def test_the_base_model_alone_and_positional_arguments_are_routed_too():
    model, inputs = build("gpt2"), batch("gpt2")
    router = random_router(model, inputs, 1)
    expected, by_name = run(model, inputs, router, keep=2)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), routed(model, router, keep=2) as chosen:
        by_place = model(ids, None, mask).logits
        hidden = model.transformer(ids, attention_mask=mask).last_hidden_state
        embedded = model(inputs_embeds=model.transformer.wte(ids), attention_mask=mask).logits
        same(model.lm_head(hidden), expected)
    same(by_place, expected)
    same(embedded, expected)
    assert all(torch.equal(mask, by_name.of(1)) for mask in chosen.masks[1])


def test_other_families_are_gated(compact_calls):
    model, inputs = build("llama"), batch("llama")
    routers = every_layer(model, inputs)
    logits, _ = run(model, inputs, routers, keep=2)
    assert not compact_calls
    assert torch.equal(logits, run(model, inputs, routers, keep=2, execution="gated")[0])
    with pytest.raises(UnderstudyError, match=r"cannot run kept heads alone.*understudy\.gated"):
        run(model, inputs, routers, keep=2, execution="compact")
    model, inputs = build("vit"), batch("vit")
    routers = every_layer(model, inputs)
    handle = model.vit.layers[1].attention.v_proj.register_forward_hook(lambda _part, _args, out: 2 * out)
    run(model, inputs, routers, keep=2)  # what a hook does to one layer would be left out
    handle.remove()
    assert not compact_calls
    run(model, inputs, routers, keep=2)
    assert compact_calls == [0, 1, 2]


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_gradients_are_the_same(name):
    model, inputs = build(name), batch(name)
    routers, found = every_layer(model, inputs), []
    for execution in ("compact", "gated"):
        model.zero_grad()
        with routed(model, routers, keep=2, execution=execution):
            model(**inputs).logits.square().sum().backward()
        found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    for key, value in found[1].items():
        assert torch.allclose(found[0][key], value, rtol=1e-8, atol=1e-10 * float(value.abs().max()) + 1e-12), key
    assert all(p.grad is None for one in routers for p in one.network.parameters())


def test_generation():
    model, inputs = build("gpt2"), batch("gpt2")
    ids = inputs["input_ids"][:1]
    router = random_router(model, inputs, 1)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    told = []
    for execution in ("compact", "gated"):
        with routed(model, router, keep=2, execution=execution) as chosen:
            told.append(model.generate(ids, use_cache=False, **settings))
        assert chosen.of(1).shape == (4, HEADS)
    assert torch.equal(*told)
    with pytest.raises(UnderstudyError, match=r"use_cache=False.*execution='gated'"), routed(model, router, keep=2):
        model.generate(ids, use_cache=True, **settings)
    with routed(model, router, keep=2, execution="gated") as chosen:
        assert model.generate(ids, use_cache=True, **settings).shape == told[0].shape
    assert chosen.of(1).sum(-1).tolist() == [2] * 4


class Broken(Exception):
    pass


@pytest.mark.parametrize("execution", ["compact", "gated"])
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_the_model_is_as_before(name, execution, monkeypatch):
    model, inputs = build(name), batch(name)

    def state():
        return [
            (key, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), vars(m).get("forward"))
            for key, m in model.named_modules()
        ], model.config.to_dict()

    before, dense, routers = state(), forward_logits(model, inputs), every_layer(model, inputs)
    assert not torch.allclose(run(model, inputs, routers, keep=2, execution=execution)[0], dense)
    assert state() == before

    def broken(*_args):
        raise Broken

    monkeypatch.setattr(Router, "choose", broken)
    with pytest.raises(Broken):
        run(model, inputs, routers, keep=2, execution=execution)
    assert state() == before
    assert torch.equal(forward_logits(model, inputs), dense)


@pytest.mark.parametrize("execution", ["compact", "gated"])
def test_no_forward_is_told(execution):
    model, inputs = build("vit"), batch("vit")
    with pytest.raises(UnderstudyError, match="at layer 0, 2, but no forward of the model ran there"):  # noqa: SIM117
        with routed(
            model, [random_router(model, inputs, 2), random_router(model, inputs, 0)], keep=2, execution=execution
        ):
            pass


def test_wrong_use():
    model, inputs = build("vit"), batch("vit")
    router = random_router(model, inputs, 1)

    def refused(message, routers=router, keep=2, **options):
        with pytest.raises(UnderstudyError, match=message), routed(model, routers, keep=keep, **options):
            pass

    refused("execution='fast' is not possible: say 'auto', 'compact' or 'gated'", execution="fast")
    refused("Two routers are for layer 1", [router, random_router(model, inputs, 1, seed=1)])
    refused("Give one router, or several for different layers", [])
    refused("keep=5 is not possible: of 4 units, 1 to 4", keep=5)
    refused("keep=0 is not possible", keep={1: 0})
    refused("Layer 1 is routed, but keep is given for layer 0, 1", keep={0: 2, 1: 2})
    refused("Layer 1 is routed, but keep is given for layer none", keep={})
    refused("Layer 7 is not there", keep={7: 2})
    refused("has other weights", Router(router.network, replace(router.card, model_hash="other")))
    model, inputs = build("albert"), batch("albert")
    refused("ALBERT applies one block at several layers", random_router(model, inputs, 1))
