"""The lens against brute force: full forwards with gates, loops, and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import spearmanr
from torch.nn.functional import cross_entropy

import understudy as us
from families import CASES, HEADS, batch, build
from naive import forward_logits, positions
from understudy import UnderstudyError as Error
from understudy.anatomy import anatomy
from understudy.inputs.perturbed import perturbed
from understudy.lens.conditioning import agreement, switching
from understudy.lens.curves import curves
from understudy.lens.joint import joint
from understudy.lens.policies import policies
from understudy.lens.proxies import PROXIES, proxies
from understudy.lens.signals import signals

FAMILIES = ["vit", "bert", "gpt2", "gpt_neox", "llama", "albert", "distilbert", "bert-classes", "gpt2-classes"]


class Graded:
    """Gates that a gradient can be taken of, at the site of one layer; a shared site is told apart by its calls."""

    def __init__(self, sites, layer, count):
        self.site, self.gates = sites[layer], torch.ones(count, HEADS, dtype=torch.float64, requires_grad=True)
        self.turn = [i for i, s in enumerate(sites) if s is self.site].index(layer)
        self.calls = 0

    def __call__(self, _site, args):
        self.calls += 1
        if self.calls - 1 != self.turn:
            return None
        width = args[0].shape[-1] // HEADS
        return (args[0] * self.gates.repeat_interleave(width, -1)[:, None], *args[1:])


def task_losses(name, logits, given):
    """The mean cross-entropy of each input's distributions with its target."""
    outcome = CASES[name].outcome
    if outcome == "classes":
        return cross_entropy(logits, given["labels"], reduction="none")
    where = positions(given, outcome)
    losses = []
    for row in range(len(logits)):
        each = []
        for place in where[row].nonzero().flatten().tolist():
            follows = place + 1 < logits.shape[1] and bool(given["attention_mask"][row, place + 1])
            use = outcome == "next" and follows
            target = given["input_ids"][row, place + 1] if use else logits[row, place].argmax()
            each.append(cross_entropy(logits[row, place], target))
        losses.append(torch.stack(each).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("name", FAMILIES)
def test_taylor_is_the_gradient_of_the_task_loss(name):
    model, given = build(name), batch(name)
    if CASES[name].outcome == "classes":
        given["labels"] = torch.tensor([0, 1, 0, 1])
    found = signals(model, given, layers=[0, -1])["taylor"].values
    sites = CASES[name].sites(model)
    for at, layer in enumerate((0, len(sites) - 1)):
        graded = Graded(sites, layer, 4)
        with graded.site.register_forward_pre_hook(graded):
            arguments = {k: v for k, v in given.items() if k not in ("positions", "labels")}
            losses = task_losses(name, model(**arguments).logits, given)
        (gradient,) = torch.autograd.grad(losses.sum(), graded.gates)
        rtol = 1e-4 if name == "llama" else 1e-6  # its norms compute in float32, whatever the model's precision
        np.testing.assert_allclose(found[:, at], gradient.abs().numpy(), rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_contributions_and_attention_are_compared_as_they_are(name):
    model, given = build(name), batch(name)
    found = signals(model, given, layers=[1])
    layer = anatomy(model).layers[1]
    seen = []
    turn = [i for i, x in enumerate(anatomy(model).layers) if x.site is layer.site].index(1)
    with layer.site.register_forward_hook(lambda _m, args, _o: seen.append(args[0].detach())):
        forward_logits(model, given)
    inner = seen[turn]
    zero = layer.site(torch.zeros(1, inner.shape[-1], dtype=torch.float64))
    mask = given.get("attention_mask", torch.ones(4, inner.shape[1])).bool()
    for row in range(4):
        parts = []
        for unit in range(HEADS):
            alone = torch.zeros_like(inner[row])
            span = slice(unit * layer.width, (unit + 1) * layer.width)
            alone[:, span] = inner[row][:, span]
            parts.append((layer.site(alone) - zero)[mask[row]].flatten().detach().numpy())
        for i in range(HEADS):
            np.testing.assert_allclose(found["norm"].values[row, 0, i], np.linalg.norm(parts[i]), rtol=1e-8)
            for j in range(HEADS):
                lengths = np.linalg.norm(parts[i]), np.linalg.norm(parts[j])
                cosine = parts[i] @ parts[j] / lengths[0] / lengths[1]
                apart = np.linalg.norm(parts[i] - parts[j]) / sum(lengths)
                np.testing.assert_allclose(found["cosine"].values[row, 0, i, j], cosine, atol=1e-8)
                np.testing.assert_allclose(found["proximity"].values[row, 0, i, j], -apart, atol=1e-7)
    model.set_attn_implementation("eager")
    arguments = {k: v for k, v in given.items() if k not in ("positions", "labels")}
    maps = model(**arguments, output_attentions=True).attentions[1].detach().numpy()
    for row in range(4):
        keep = mask[row].numpy()
        flat = maps[row][:, keep].reshape(HEADS, -1)
        truth = flat @ flat.T / np.outer(np.linalg.norm(flat, axis=1), np.linalg.norm(flat, axis=1))
        np.testing.assert_allclose(found["attention"].values[row, 0], truth, atol=1e-8)


def test_attention_is_as_before_after_its_maps_were_read():
    model, given = build("gpt2"), batch("gpt2")
    before = forward_logits(model, given), model.config._attn_implementation
    signals(model, given)
    assert torch.equal(forward_logits(model, given), before[0])
    assert model.config._attn_implementation == before[1]


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "gpt_neox", "llama", "distilbert"])
def test_parameters_of_a_head_are_its_own(name):
    """A change of one head's queries changes the similarities of that head alone."""
    model, given = build(name), batch(name)
    before = signals(model, given, layers=[1])["parameters"].values[0]
    attention = anatomy(model).layers[1].attention
    leaves = {n.rpartition(".")[2]: m for n, m in attention.named_modules()}
    width = anatomy(model).layers[1].width
    with torch.no_grad():
        for query in ("q_proj", "query", "q_lin"):
            if query in leaves:
                leaves[query].weight[width : 2 * width] += 1
        if "c_attn" in leaves:
            leaves["c_attn"].weight[:, width : 2 * width] += 1
        if "query_key_value" in leaves:
            leaves["query_key_value"].weight[3 * width : 4 * width] += 1
    after = signals(model, given, layers=[1])["parameters"].values[0]
    moved = ~np.isclose(before, after, atol=1e-12)
    assert moved[1, [0, 2, 3]].all()
    assert not moved[np.ix_([0, 2, 3], [0, 2, 3])].any()


def test_curves_hold_the_run_of_the_same_grid():
    model, given = us.load("digits"), us.digits(6)
    found = curves(model, given, layers=[0, -1], search="grid:7")
    run = us.measure(model, given, layers=[0, -1], search="grid:7")
    S = found["substitutability"].values
    np.testing.assert_allclose(S, run["substitutability"].values, atol=1e-5)
    np.testing.assert_array_equal(S == 0, run["substitutability"].values == 0)  # exact zeros stay exact
    np.testing.assert_allclose(found["drop"].values, run["drop"].values, rtol=1e-5)
    at_one = found["divergence"].sel(alpha=1.0).values
    np.testing.assert_array_equal(at_one, np.where(np.isnan(at_one), np.nan, found["drop"].values[..., None]))
    with pytest.raises(Error, match="Curves are measured on a grid"):
        curves(model, given, search="refine")


@pytest.fixture(scope="module")
def made():
    """Curves and signals of six inputs, two layers and four units, with an invalid source."""
    chance = np.random.default_rng(0)
    D = chance.uniform(0.1, 2.0, (6, 2, 4, 4, 5))
    drop = chance.uniform(0.8, 1.5, (6, 2, 4))
    D[..., 2] = drop[..., None]  # alpha = 1
    D[:, :, range(4), range(4)] = np.nan
    D[3, 1, 2] = np.nan
    least = D.min(-1)
    dims = ("input", "layer", "source", "substitute")
    coords = {"input": list("abcdef"), "layer": [0, 1], "alpha": [0, 0.5, 1, 2, 3]}
    table = xr.Dataset(
        {
            "divergence": ((*dims, "alpha"), D),
            "drop": (dims[:3], drop),
            "substitutability": (dims, 1 - least / drop[..., None]),
        },
        coords,
    )
    seen = xr.Dataset(
        {
            **{name: (dims, chance.normal(size=(6, 2, 4, 4))) for name in ("attention", "cosine", "proximity")},
            **{name: (("input", "layer", "substitute"), chance.normal(size=(6, 2, 4))) for name in ("taylor", "norm")},
            "parameters": (dims[1:], chance.normal(size=(2, 4, 4))),
        },
        {"input": list("abcdef"), "layer": [0, 1]},
    )
    return table, seen


def test_policies_by_loops(made):
    table, seen = made
    found = policies(table, seen, calibration=["a", "c", "e"], resamples=50)
    D, drop = table["divergence"].values, table["drop"].values
    fit, test = [0, 2, 4], [1, 3, 5]
    kl = {name: [[] for _ in range(2)] for name in found.index}
    recovered = {name: [[] for _ in range(2)] for name in found.index}
    for layer in range(2):
        for x in test:
            for i in range(4):
                others = [j for j in range(4) if j != i]
                if np.isnan(D[x, layer, i, others]).all():
                    continue
                mean = {j: np.nanmean(D[fit, layer, i, j], axis=0) for j in others}
                alpha = {j: int(np.argmin(mean[j])) for j in others}
                fixed = min(others, key=lambda j: mean[j][alpha[j]])
                near = max(others, key=lambda j: seen["proximity"].values[x, layer, i, j])
                strong = max(others, key=lambda j: seen["taylor"].values[x, layer, j])
                at = {j: D[x, layer, i, j, alpha[j]] for j in others}
                best = {j: min(D[x, layer, i, j].min(), drop[x, layer, i]) for j in others}
                values = {
                    "drop": drop[x, layer, i],
                    "fixed_fixed": at[fixed],
                    "l2_fixed": at[near],
                    "conditional_fixed": min(at.values()),
                    "random_oracle": np.mean(list(best.values())),
                    "l2_oracle": best[near],
                    "fixed_oracle": best[fixed],
                    "taylor_oracle": best[strong],
                    "conditional_oracle": min(best.values()),
                }
                for name, value in values.items():
                    kl[name][layer].append(value)
                    recovered[name][layer].append(1 - value / drop[x, layer, i])
    for name in found.index:
        np.testing.assert_allclose(found.loc[name, "kl"], np.mean([np.mean(part) for part in kl[name]]))
        np.testing.assert_allclose(found.loc[name, "S"], np.mean([np.mean(part) for part in recovered[name]]))
    assert found.attrs["calibration"] == ["a", "c", "e"]
    assert found.loc["conditional_oracle", "S_gap"] == 0
    assert (found.drop("conditional_oracle")["S_gap"] < 0).all()
    assert found["sources"].iloc[0] == 23


def test_a_source_without_calibration_is_left_as_it_is(made):
    table, seen = made
    table = table.copy(deep=True)
    table["divergence"].values[[0, 2, 4], 0, 0] = np.nan  # source 0 of layer 0 is valid on no calibration input
    found = policies(table, seen, calibration=["a", "c", "e"], resamples=0)
    assert found["unfitted"].iloc[0] == 3
    assert found["sources"].iloc[0] == 23
    only = policies(table.isel(layer=[0], source=[0]), seen.isel(layer=[0], source=[0]), calibration=["a", "c", "e"])
    assert only.loc[["fixed_fixed", "conditional_fixed"], "S"].tolist() == [0.0, 0.0]
    assert only.loc["conditional_oracle", "S"] > 0


def test_a_calibration_split_needs_inputs_on_both_sides(made):
    table, seen = made
    for share in (0.01, ["a", "b", "c", "d", "e", "f"]):
        with pytest.raises(Error, match="both it and the rest need at least one"):
            policies(table, seen, calibration=share)
    with pytest.raises(Error, match="names 'z', which is no input"):
        policies(table, seen, calibration=["z"])
    with pytest.raises(Error, match="a share of the inputs"):
        policies(table, seen, calibration=2.0)


def test_proxies_by_scipy(made):
    table, seen = made
    seen = seen.copy(deep=True)
    seen["norm"].values[0, 0] = 1.0  # constant: no ranking
    found = proxies(table, seen, resamples=50)
    S = table["substitutability"].values
    for name in PROXIES:
        by_layer, left = [], 0
        for layer in range(2):
            values = []
            for x in range(6):
                for i in range(4):
                    others = [j for j in range(4) if j != i]
                    if np.isnan(S[x, layer, i, others]).all():
                        continue
                    part = seen[name].transpose(..., "substitute")
                    if name == "parameters":
                        score = part.values[layer, i, others]
                    elif name in ("taylor", "norm"):
                        score = part.values[x, layer, others]
                    else:
                        score = part.values[x, layer, i, others]
                    if len(set(score)) == 1 or len(set(S[x, layer, i, others])) == 1:
                        left += 1
                        continue
                    values.append(spearmanr(score, S[x, layer, i, others]).statistic)
            by_layer.append(np.mean(values))
        np.testing.assert_allclose(found.loc[name, "spearman"], np.mean(by_layer))
        assert found.loc[name, "constant"] == left
        assert found.loc[name, "rankings"] + left == 47


def test_switching_and_agreement_by_loops(made):
    table, _ = made
    S = table["substitutability"].values
    found = switching(table)
    for (layer, source), row in found.iterrows():
        best = [np.nanargmax(S[x, layer, source]) for x in range(6) if not np.isnan(S[x, layer, source]).all()]
        counts = np.bincount(best)
        assert row["inputs"] == len(best)
        assert row["modal"] == counts.max() / len(best)
        assert row["switching"] == 1 - row["modal"]
        assert row["distinct"] == len(set(best))
    other = table.copy(deep=True)
    other["substitutability"].values[:] = S + np.random.default_rng(1).normal(0, 0.3, S.shape)
    both = agreement(table, other)
    T = other["substitutability"].values
    for x in range(6):
        for layer in range(2):
            known = np.isfinite(S[x, layer]) & np.isfinite(T[x, layer])
            sources = [i for i in range(4) if known[i].any()]
            same = np.mean([np.nanargmax(S[x, layer, i]) == np.nanargmax(T[x, layer, i]) for i in sources])
            assert both["best"].values[x, layer] == same
            truth = spearmanr(S[x, layer][known], T[x, layer][known]).statistic
            np.testing.assert_allclose(both["spearman"].values[x, layer], truth)
            truth = np.corrcoef(S[x, layer][known], T[x, layer][known])[0, 1]
            np.testing.assert_allclose(both["pearson"].values[x, layer], truth)


@pytest.mark.parametrize("units", ["kv", "neurons:4"])
def test_the_lens_takes_other_units(units):
    model, given = build("llama"), batch("llama")
    number = {"kv": 2, "neurons:4": 4}[units]
    seen = signals(model, given, units=units)
    assert seen.sizes["source"] == number
    assert seen["attention"].isnull().all()
    assert seen["parameters"].isnull().all()
    assert seen["taylor"].notnull().all()
    assert curves(model, given, units=units, search="grid:3").sizes["source"] == number
    assert joint(model, given, units=units, keep=1).sizes["unit"] == number
    ranked = proxies(us.measure(model, given, units=units, search="grid:4"), seen, resamples=0)
    assert ranked.loc["attention", ["rankings", "constant"]].tolist() == [0, 0]


def test_perturbations_are_mild_repeatable_and_what_they_say():
    digits = us.digits(4)
    pixels = digits.batch(range(4))["pixel_values"]
    for kind in ("colour", "flip", "shift"):
        changed = perturbed(digits, kind)
        one = changed.batch([2])["pixel_values"][0]
        torch.testing.assert_close(changed.batch(range(4))["pixel_values"][2], one)
        assert not torch.equal(one, pixels[2])
        assert changed.fingerprint() != digits.fingerprint()
    torch.testing.assert_close(perturbed(digits, "flip").batch([0])["pixel_values"][0], pixels[0].flip(-1))
    torch.testing.assert_close(perturbed(digits, "shift").batch([0])["pixel_values"][0][..., 1:], pixels[0][..., :-1])
    assert float((perturbed(digits, "colour").batch([0])["pixel_values"][0] - pixels[0]).abs().max()) < 0.11
    texts = us.stdlib(2, length=40)
    before, after = texts.batch([0])["input_ids"][0], perturbed(texts, "replace:0.2").batch([0])["input_ids"][0]
    assert 0 < int((before != after).sum()) <= 8
    assert set(after.tolist()) <= set(before.tolist())
    masked = {"input_ids": torch.arange(20)[None], "positions": torch.zeros(1, 20, dtype=torch.bool)}
    masked["positions"][0, 5:8] = True
    for seed in range(20):
        changed = perturbed(us.Inputs.of(masked), "replace:0.5", seed=seed).batch([0])["input_ids"][0]
        assert changed[[0, 5, 6, 7, 19]].tolist() == [0, 5, 6, 7, 19]
        assert not {0, 5, 6, 7, 19} & set(changed[[1, 2, 3, 4, *range(8, 19)]].tolist())
        assert int((changed != masked["input_ids"][0]).sum()) == 10
    for kind in ("blur", "replace", "replace:2", "replace:x", "flip:1"):
        with pytest.raises(Error, match="is not possible: say colour, flip, shift or replace:SHARE"):
            perturbed(digits, kind)
    with pytest.raises(Error, match="needs input_ids"):
        perturbed(digits, "replace:0.1").batch([0])
