"""The result: its shape, its protocol, and the sentences for wrong use."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import understudy as us
from families import CASES, HEADS, batch, build
from understudy.search import Grid, Pairs

Error = us.UnderstudyError


def test_the_dataset(vit, pictures):
    run = us.measure(vit, us.Inputs.of(pictures, ids=list("abcdef")), layers=[-1, 0], search="grid:4")
    assert dict(run.sizes) == {"input": 6, "layer": 2, "source": HEADS, "substitute": HEADS}
    assert run["layer"].values.tolist() == [0, 2]
    assert run["input"].values.tolist() == list("abcdef")
    S, D, drop = (run[name].values for name in ("substitutability", "damage", "drop"))
    diagonal = np.eye(HEADS, dtype=bool)
    assert np.isnan(S[..., diagonal]).all()
    valid = drop > 1e-5
    assert np.isfinite(S[..., ~diagonal]).reshape(6, 2, HEADS, HEADS - 1).all(-1).tolist() == valid.tolist()
    np.testing.assert_allclose(S, 1 - D / drop[..., None], atol=1e-5)
    assert np.nanmin(S) >= 0  # alpha = 1 is always a candidate
    assert set(np.unique(run["compensation"].values[np.isfinite(S)]).tolist()) <= {0.0, 1.0, 2.0, 3.0}
    expected = {"model", "revision", "units", "search", "threshold", "outcome", "dtype", "seed", "versions"}
    assert expected | {"evaluations", "seconds", "identity", "zero"} <= set(run.attrs)
    assert run.attrs["evaluations"] == 6 * 2 * (2 + HEADS) + int(valid.sum()) * (HEADS - 1) * 3
    assert "drop" in run
    assert float(run["noise"].max()) < 1e-9


def test_every_damage_was_run(vit, pictures):
    run = us.measure(vit, pictures, layers=1, search="grid:7")
    with torch.no_grad():
        dense = vit(**pictures).logits
    worst = 0.0
    for i in range(HEADS):
        for j in range(HEADS):
            if i == j:
                continue
            for x in range(3):
                alpha = float(run["compensation"][x, 0, i, j])
                with us.gated(vit, {(1, i): 0.0, (1, j): alpha}), torch.no_grad():
                    other = vit(pictures["pixel_values"][x : x + 1]).logits
                log_p, log_q = dense[x].double().log_softmax(-1), other[0].double().log_softmax(-1)
                damage = float((log_p.exp() * (log_p - log_q)).sum())
                worst = max(worst, abs(damage / float(run["damage"][x, 0, i, j]) - 1))
    assert worst < 1e-3


def test_invalid_sources_are_nan_and_cost_nothing(vit, pictures):
    drop = us.measure(vit, pictures, search="grid:3")["drop"].values
    threshold = float(np.median(drop))
    run = us.measure(vit, pictures, search="grid:3", threshold=threshold)
    invalid = np.isnan(run["substitutability"].values).all(-1)
    assert invalid.tolist() == (drop <= threshold).tolist()
    assert 0 < invalid.mean() < 1
    # Of a grid of three, the two that are not 1 (0, 1.5, 3 does not hold 1, so all three).
    assert run.attrs["evaluations"] == 6 * (2 + HEADS) + int((~invalid).sum()) * (HEADS - 1) * 3


def test_layers_by_name(vit):
    from understudy.anatomy import anatomy
    from understudy.worker import resolve_layers

    body = anatomy(vit)
    assert resolve_layers(body, "last") == (2,)
    assert resolve_layers(body, "all") == (0, 1, 2)
    assert resolve_layers(body, "quarters") == (0, 1, 2)
    assert resolve_layers(body, [-1, 2, 0]) == (0, 2)
    assert resolve_layers(body, -3) == (0,)


def test_a_grid_finds_the_least_on_it_and_counts_alpha_one_for_free():
    pairs = Pairs(
        torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), torch.full((3,), 0.5), 3
    )
    best = torch.tensor([0.4, 1.05, 2.9], dtype=torch.float64)
    seen = []

    def evaluate(gates, _owner):
        alpha = gates.gather(1, torch.tensor([1, 2, 0]).repeat_interleave(30)[:, None])[:, 0]
        assert (gates.gather(1, torch.tensor([0, 1, 2]).repeat_interleave(30)[:, None]) == 0).all()
        seen.extend(alpha.tolist())
        return (alpha - best.repeat_interleave(30)) ** 2 + torch.where(best.repeat_interleave(30) == 1.05, 0.6, 0.0)

    found = Grid(31).best(pairs, evaluate)
    damage, alpha = found.damage, found.compensation
    assert not any(math.isclose(value, 1.0) for value in seen)
    assert alpha.tolist() == pytest.approx([0.4, 1.0, 2.9])
    assert damage[1] == 0.5  # exactly the drop


def test_progress_ends_at_the_total(vit, pictures):
    calls = []
    us.measure(vit, pictures, layers="all", search="grid:3", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (18, 18)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_fingerprint_sees_one_weight_in_a_million():
    from understudy.anatomy import anatomy
    from understudy.identity import fingerprint

    model = build("vit", torch.float32)
    before = fingerprint(anatomy(model))
    assert before == fingerprint(anatomy(build("vit", torch.float32)))
    model.vit.layers[1].mlp.fc1.weight.data[7, 13] += 1e-6
    assert before != fingerprint(anatomy(model))


# Wrong use: one sentence that says what was given and what is possible.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "Layer 3 is not there: ViTForImageClassification has 3 layers, 0 to 2"),
        ({"layers": "middle"}, "layers='middle' is not possible: say 'last', 'all', 'quarters'"),
        ({"layers": []}, "No layer was given"),
        (
            {"units": "tokens"},
            "units='tokens' is not possible: the units that can be gated are 'heads', 'kv' and 'neurons:N'",
        ),
        (
            {"search": "bisect"},
            "Search 'bisect' is not known: possible are 'refine', 'grid:N', 'screen:K', 'estimate' and 'estimate:K'",
        ),
        ({"search": "grid:1"}, "A grid needs at least 2 points, but grid:1"),
        ({"outcome": "next"}, "Outcome 'next' is not one that ViTForImageClassification has: its classification head"),
        ({"threshold": 0}, "threshold must be above 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"dtype": "int8"}, "dtype 'int8' is not possible: choose one of float64, float32"),
    ],
)
def test_wrong_options(vit, pictures, options, message):
    with pytest.raises(Error, match=message.replace("(", r"\(")):
        us.measure(vit, pictures, **options)


def test_a_head_count_that_does_not_divide():
    model = build("vit", torch.float32)
    model.config.num_attention_heads = 5
    with pytest.raises(Error, match="layer 0 reads 32 values, which 5 heads do not divide"):
        us.measure(model, batch("vit", dtype=torch.float32))


def test_a_family_that_is_not_known():
    from transformers import T5Config, T5ForConditionalGeneration

    tiny = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(
        Error, match=r"T5ForConditionalGeneration \(model_type 't5'\) is of no known family. Supported: ViT"
    ):
        us.measure(T5ForConditionalGeneration(tiny), {})
    with pytest.raises(Error, match=r"Linear is of no known family.*understudy.anatomy.FAMILIES"):
        us.measure(nn.Linear(2, 2), {})
    with pytest.raises(Error, match=r"must be a torch.nn.Module, but a str was given"):
        us.measure("digits", {})


def test_a_model_without_a_head():
    from transformers import BertModel

    model = BertModel(build("bert").config)
    with pytest.raises(Error, match="BertModel has no head that predicts a distribution"):
        us.measure(model, batch("bert"))


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("vit", {"pixel_values": torch.zeros(2, 1, 16, 16)}, r"do not fit ViTFor.*pixel_values \[1, 16, 16\] for each"),
        ("vit", {"input_ids": torch.zeros(2, 4, dtype=torch.long)}, "takes pixel_values, but the batch has input_ids"),
        ("gpt2", {"input_ids": torch.full((2, 4), 99)}, r"do not fit GPT2LMHeadModel: given input_ids \[4\]"),
        ("gpt2", {"input_ids": torch.zeros(2, 99, dtype=torch.long)}, "do not fit GPT2LMHeadModel"),
        ("gpt2", {}, "A batch dict needs tensors"),
        ("gpt2", {"input_ids": torch.zeros(2, 4), "attention_mask": torch.ones(3, 4)}, "one common first dimension"),
        (
            "gpt2",
            {"input_ids": torch.zeros(2, 4).long(), "attention_mask": torch.zeros(2, 4)},
            "Input '0' has no token",
        ),
        ("bert", {"input_ids": torch.ones(2, 4).long()}, "Which tokens are masked is not known.*Add `positions`"),
        (
            "bert",
            {"input_ids": torch.ones(2, 4).long(), "positions": torch.zeros(2, 4).bool()},
            "Input '0' has no masked token: mask some",
        ),
        (
            "bert",
            {"input_ids": torch.ones(2, 4).long(), "positions": torch.zeros(2, 3).bool()},
            r"one bool for each of the 4 tokens of an input, but are \[3\]",
        ),
    ],
)
def test_inputs_that_do_not_fit(name, inputs, message):
    with pytest.raises(Error, match=message):
        us.measure(build(name, torch.float32), inputs)


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_a_model_that_returns_nan(name):
    model = build(name, torch.float32)
    list(model.parameters())[-1].data.fill_(torch.nan)
    with pytest.raises(Error, match=r"None of the \d inputs could be measured. Of input '0': its outcome is not a num"):
        us.measure(model, batch(name, dtype=torch.float32))


def test_masks_are_found_by_the_mask_token():
    model, inputs = build("bert"), batch("bert")
    model.config.mask_token_id = 5
    by_token = us.measure(model, {k: v for k, v in inputs.items() if k != "positions"}, search="grid:3")
    np.testing.assert_array_equal(by_token["drop"].values, us.measure(model, inputs, search="grid:3")["drop"].values)


def test_every_case_is_a_family():
    from understudy.anatomy import FAMILIES, anatomy

    covered = {anatomy(build(name)).family.title for name in CASES}
    assert covered == {family.title for key, family in FAMILIES.items() if key != "timm"}


def test_sources_at_the_threshold_are_counted(vit, pictures):
    run = us.measure(vit, pictures, search="grid:3")
    drops = np.sort(run["drop"].values.flatten())
    at = us.measure(vit, pictures, search="grid:3", threshold=float(drops[3]) * 1.0005)
    table = us.summary(at, resamples=0)
    assert table["borderline"].tolist() == [1, 1]
    assert us.summary(run, resamples=0)["borderline"].sum() == 0
