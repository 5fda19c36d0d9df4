"""What can be known of CFS without intervening: features, the predictor, and what predictions are worth."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import understudy as us
from families import CASES, batch, build
from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError
from understudy.lens.attention import attention_maps
from understudy.lens.parameters import projections
from understudy.lens.passes import opened
from understudy.lens.signals import signals
from understudy.reproduce import table6
from understudy.reproduce.study import Setting
from understudy.routing.features import SOURCES, features, queries_keys_values, scores, visible
from understudy.routing.lesson import summaries
from understudy.routing.probes import BRIEF, Examples, predicted, probe, score

ROTARY = ("gpt_neox", "llama", "mistral", "qwen", "gemma")


def chance(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def watched(module):
    """What a module was given and what it said, call by call."""
    calls = []
    handle = module.register_forward_hook(
        lambda _, args, kwargs, out: calls.append((args[0] if args else kwargs["hidden_states"], out)), with_kwargs=True
    )
    yield calls
    handle.remove()


@pytest.mark.parametrize(
    ("name", "maps"),
    [("vit", ("q_proj", "k_proj", "v_proj")), ("bert", ("query", "key", "value")), ("gpt2", ("c_attn",))],
)
def test_queries_keys_and_values_are_what_the_models_own_modules_say(name, maps):
    model = build(name)
    layer = anatomy(model).layers[1]
    with ExitStack() as stack, torch.no_grad():
        entered, *seen = (
            stack.enter_context(watched(part))
            for part in (layer.attention, *(layer.attention.get_submodule(name) for name in maps))
        )
        model(**{key: value for key, value in batch(name).items() if key != "positions"})
    said = torch.cat([calls[0][1] for calls in seen], -1).chunk(3, -1)
    for ours, own in zip(queries_keys_values(layer, entered[0][0]), said, strict=True):
        assert torch.allclose(ours.transpose(1, 2).flatten(2), own, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(ROTARY)])
def test_attention_put_together_from_its_parts_is_the_models_own(name):
    model = build(name)
    with opened(model, batch(name), layers=1) as worker:
        layer = worker.body.layers[1]
        calls = sum(part.attention is layer.attention for part in worker.body.layers[:2])  # a shared one runs for each
        with watched(layer.attention) as entered:
            captured = next(worker.captures(range(4)))
        q, k, v = queries_keys_values(layer, entered[calls - 1][0])
        own = attention_maps(worker, captured)[1]
    real = captured.taken.batch.get("attention_mask", torch.ones(q.shape[0], q.shape[2])).bool()
    see = visible(layer, real)
    A = scores(layer, q, k).masked_fill(~see[:, None], -1e30).softmax(-1)
    assert torch.allclose(A.transpose(1, 2)[real], own.transpose(1, 2)[real], atol=1e-9)
    inner = (A @ v).transpose(1, 2).flatten(2)
    assert torch.allclose(inner[real], captured.taken.sites[1].inner[real], atol=1e-9)


def test_heads_of_a_group_have_the_same_keys_and_values():
    q, k, v = projections(anatomy(build("llama")).layers[0])
    assert q.weight.shape == k.weight.shape == v.weight.shape == (4, 12, 32)
    assert torch.equal(k.weight[0], k.weight[1])
    assert not torch.equal(k.weight[1], k.weight[2])
    assert not q.bias.any()


@pytest.fixture(scope="module")
def digits():
    model, inputs = us.load("digits"), us.digits(12)
    return model, inputs, features(model, inputs)


def test_features_are_what_their_names_say(digits):
    model, inputs, found = digits
    assert tuple(found) == SOURCES
    assert torch.allclose(found["residual"], summaries(model, inputs, layer=-1), atol=1e-5)
    layer = anatomy(model).layers[-1]
    pixels = inputs.batch(range(12))["pixel_values"]
    with watched(layer.attention) as entered, watched(layer.site) as projected, torch.no_grad():
        model(pixel_values=pixels)
    inner = projected[0][0]  # [inputs, tokens, heads · unit]
    assert torch.allclose(found["AV"][:, :48], inner[:, 0], atol=1e-5)
    assert torch.allclose(found["AV"][:, 48:96], inner[:, 1:].mean(1), atol=1e-5)
    each = found["contributions"].view(12, 6, 3, 48)  # head, [anchor; mean; variance], width
    assert torch.allclose(each[:, :, 0].sum(1) + layer.site.bias, projected[0][1][:, 0], atol=1e-4)
    q, k, _ = queries_keys_values(layer, entered[0][0])
    z = scores(layer, q, k)
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)  # [inputs, heads, queries]
    rows = torch.stack([z.mean(-1), z.var(-1, unbiased=False), z.amax(-1), entropy], -1)
    parts = found["logits"].view(12, 6, 3, 4)
    assert torch.allclose(parts[:, :, 0], rows[:, :, 0], atol=1e-4)
    assert torch.allclose(parts[:, :, 1], rows[:, :, 1:].mean(2), atol=1e-4)


def test_the_gradient_is_the_slope_of_the_models_own_loss(digits):
    model, inputs, found = digits
    given = inputs.batch(range(12))
    gates = torch.ones(12, 6, requires_grad=True)
    site = anatomy(model).layers[-1].site
    handle = site.register_forward_pre_hook(lambda _, args: (args[0] * gates.repeat_interleave(8, -1)[:, None],))
    logp = model(pixel_values=given["pixel_values"]).logits.log_softmax(-1)
    handle.remove()
    (slope,) = torch.autograd.grad(-logp[range(12), given["labels"]].sum(), gates, retain_graph=True)
    each = torch.stack([torch.autograd.grad(logp[:, c].sum(), gates, retain_graph=True)[0] for c in range(10)], -1)
    each = each * logp.detach().exp().sqrt()[:, None]  # [inputs, heads, classes]
    for vector, ours in ((slope, found["gradient"][:, :7]), (each, found["gradient"][:, 7:].view(12, 6, 11))):
        length = vector.norm(dim=-1, keepdim=True)
        assert torch.allclose(ours[..., :-1], vector / length, atol=1e-3)
        assert torch.allclose(ours[..., -1:], length.log(), atol=1e-3)
    taylor = torch.from_numpy(signals(model, inputs)["taylor"].values[:, 0]).float()
    assert torch.allclose(taylor, slope.abs(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "bert-classes", "gpt2", "llama"])
def test_features_of_texts_are_those_of_their_own_length(name):
    model = build(name, torch.float32)
    padded = {key: value[1:2] for key, value in batch(name).items()}  # the last three tokens are padding
    beside = us.Inputs.of({key: value[:2] for key, value in batch(name).items()})
    alone = us.Inputs.of({key: value[:, :6] for key, value in padded.items()})
    for layer in (0, -1):
        found, expected = features(model, beside, layer=layer), features(model, alone, layer=layer)
        for source in SOURCES:
            assert torch.isfinite(found[source]).all()
            assert torch.allclose(found[source][1:], expected[source], rtol=1e-3, atol=1e-3), source


def test_many_classes_are_cut_to_the_likeliest():
    found = features(build("gpt2", torch.float32), batch("gpt2"))
    assert found["gradient"].shape == (4, 5 + 4 * 11)  # four heads, ten of 61 tokens


def test_maps_without_known_names_are_told(monkeypatch):
    monkeypatch.setattr("understudy.routing.features.projections", lambda _: None)
    with pytest.raises(UnderstudyError, match=r"queries, keys and values of layer 3 \(ViTAttention\) are not known"):
        features(us.load("digits"), us.digits(2))


def test_metrics_are_those_of_brute_force():
    S, given = chance(5, 6, 6).numpy() * 1.5 - 0.7, chance(5, 6, 6, seed=1).numpy()
    S[:, range(6), range(6)] = np.nan
    S[1, 3] = S[4] = np.nan  # invalid sources, and an input without any other
    S[2, 2, [0, 1, 3, 4, 5]] = 0.0  # equals: every representative is right, and nothing is ranked
    given[0, 1] = np.nan  # nothing was said of this source
    reached, right, ranked = [], [], []
    for x in range(5):
        for i in range(6):
            others = [j for j in range(6) if j != i and np.isfinite(S[x, i, j])]
            if not others:
                continue
            known = [j for j in others if np.isfinite(given[x, i, j])]
            if not known:
                reached.append(0.0)
                right.append(False)
                continue
            best = max(known, key=lambda j: given[x, i, j])
            reached.append(S[x, i, best])
            right.append(S[x, i, best] == max(S[x, i, j] for j in others))
            if len({S[x, i, j] for j in known}) > 1:
                ranked.append(spearmanr([S[x, i, j] for j in known], [given[x, i, j] for j in known]).statistic)
    found = score(given, S)
    assert found.recovery == pytest.approx(np.mean(reached))
    assert found.accuracy == pytest.approx(np.mean(right))
    assert found.spearman == pytest.approx(np.mean(ranked))
    assert (found.sources, found.unscored, found.constant) == (23, 1, 2)


def test_the_oracle_is_always_right_and_none_recovers_more():
    S = chance(9, 5, 5).numpy()
    S[:, range(5), range(5)] = np.nan
    oracle = score(S, S)
    assert (oracle.accuracy, oracle.spearman) == (1.0, pytest.approx(1.0))
    assert score(chance(9, 1, 5, seed=3).numpy(), S).recovery < oracle.recovery  # one score for all sources
    assert score(-S, S).spearman == pytest.approx(-1.0)
    with pytest.raises(UnderstudyError, match="On none of 2 inputs is a source valid"):
        score(S[:2], np.full((2, 5, 5), np.nan))


def told(count, seed):
    """S that hangs on the input: a unit is a good substitute where its feature is large."""
    z = chance(count, 4, seed=seed)
    S = z[:, None].expand(-1, 4, -1).clone()
    S[:, range(4), range(4)] = torch.nan
    return Examples(z, S)


def test_a_probe_learns_what_its_features_tell_and_is_the_same_for_a_seed():
    training, validation, test = told(96, 0), told(16, 1), told(32, 2)
    brief = replace(BRIEF, epochs=8)
    first, again, other = (probe(training, validation, seed=seed, by=brief) for seed in (1, 1, 2))
    said = [predicted(network, test.features) for network in (first, again, other)]
    assert np.array_equal(said[0], said[1])
    assert not np.array_equal(said[0], said[2])
    blind = Examples(chance(96, 4, seed=5), training.S)
    nothing = predicted(probe(blind, validation, seed=1, by=brief), test.features)
    assert score(said[0], test.S.numpy()).spearman > 0.8 > score(nothing, test.S.numpy()).spearman


def test_a_probe_does_not_mind_the_size_of_features_or_inputs_without_a_source():
    training, validation, test = told(64, 0), told(16, 1), told(8, 2)
    brief = replace(BRIEF, epochs=2)
    expected = predicted(probe(training, validation, seed=1, by=brief), test.features)
    tiny = [Examples(part.features * 2.0**-30, part.S) for part in (training, validation, test)]
    assert np.allclose(predicted(probe(*tiny[:2], seed=1, by=brief), tiny[2].features), expected, atol=1e-4)
    empty = Examples(
        torch.cat([training.features, chance(3, 4)]), torch.cat([training.S, torch.full((3, 4, 4), torch.nan)])
    )
    assert np.array_equal(predicted(probe(empty, validation, seed=1, by=brief), test.features), expected)
    with pytest.raises(UnderstudyError, match="On none of 3 inputs is a source valid, so there is no S to predict"):
        probe(Examples(empty.features[-3:], empty.S[-3:]), validation, seed=1)


def test_the_study_runs_on_few_inputs_of_ones_own(monkeypatch):
    monkeypatch.setattr(table6, "SEEDS", (17,))
    setting = Setting("mini", us.load("digits"), lambda count: us.digits(min(count, 40)), own=True)
    report = table6.STUDY.run(setting)
    table = report.tables["observability"]
    assert tuple(table.index) == (*SOURCES, "taylor", "estimate", "oracle")
    assert table.loc["gradient", "recovery_paper"] == 0.2643
    assert (table["recovery"] <= table.loc["oracle", "recovery"]).all()
    assert table.loc["oracle", "accuracy"] == 1
    assert report.about["inputs"] == "32 to fit, 1 to choose the epoch by, 7 to test"
    assert [finding.holds for finding in report.findings].count(None) == 0
    assert report.data["predicted"]["predicted"].shape == (7, 1, 7, 6, 6)
    few = Setting("mini", us.load("digits"), lambda _: us.digits(7), own=True)
    with pytest.raises(UnderstudyError, match="it needs at least 8, but here are 7"):
        table6.STUDY.run(few)


def test_fewer_held_out_digits_mean_fewer_to_fit_to():
    training, held_out = table6._inputs(Setting("mini", us.load("digits-12"), lambda _: us.digits(16)))
    assert (len(training), len(held_out)) == (37, 16)
    assert not set(training.ids) & set(held_out.ids)
    training, _ = table6._inputs(Setting("mini", us.load("digits-12"), us.digits))
    assert len(training) == 1198
