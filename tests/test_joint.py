"""The exact joint-subset oracle against enumeration by full forwards, and subsets by their definition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

import understudy as us
from families import CASES, HEADS, batch, build
from naive import divergence, forward_logits, gate_site, positions
from understudy import UnderstudyError as Error
from understudy.lens.joint import joint, joint_table
from understudy.lens.signals import signals
from understudy.lens.subsets import best_by_utility, largest, subsets, utility


@pytest.mark.parametrize("name", ["vit", "gpt2", "bert"])
def test_the_joint_oracle_by_enumeration(name):
    model, given = build(name), batch(name)
    if CASES[name].outcome == "classes":
        given["labels"] = torch.tensor([0, 1, 0, 1])
    chance = np.random.default_rng(0)
    S, weight = chance.uniform(size=(4, HEADS, HEADS)), chance.uniform(size=(4, HEADS))
    score = chance.normal(size=(4, HEADS))
    found = joint(model, given, keep=[1, 2, 3], layer=-1, policies={"score": score}, utilities={"pairs": (S, weight)})
    sites, dense = CASES[name].sites(model), forward_logits(model, given)
    where = positions(given, CASES[name].outcome)
    for keep in (1, 2, 3):
        values, masks = [], list(combinations(range(HEADS), keep))
        for mask in masks:
            gates = torch.zeros(HEADS)
            gates[list(mask)] = 1
            with gate_site(sites, len(sites) - 1, HEADS, gates):
                logits = forward_logits(model, given)
            same = (logits.argmax(-1) == dense.argmax(-1)).double()
            same = same if where is None else torch.stack([same[r][where[r]].mean() for r in range(4)])
            values.append((divergence(dense, logits, where), same, logits.argmax(-1)))
        D = torch.stack([value[0] for value in values]).numpy()
        here = found.sel(keep=keep)
        for row in range(4):
            best = int(D[:, row].argmin())
            np.testing.assert_allclose(here["kl"].sel(policy="oracle").values[row], D[best, row], rtol=1e-6)
            chosen = np.flatnonzero(here["subset"].sel(policy="oracle").values[row])
            assert tuple(chosen) == masks[best]
            np.testing.assert_allclose(here["fidelity"].sel(policy="oracle").values[row], values[best][1][row])
            by_score = tuple(sorted(np.argsort(-score[row])[:keep]))
            np.testing.assert_allclose(
                here["kl"].sel(policy="score").values[row], D[masks.index(by_score), row], rtol=1e-6
            )
            worth = [
                sum(weight[row, i] * (1 if i in mask else max(S[row, i, j] for j in mask)) for i in range(HEADS))
                for mask in masks
            ]
            kept = tuple(np.flatnonzero(here["subset"].sel(policy="pairs").values[row]))
            assert kept == masks[int(np.argmax(worth))]
            if CASES[name].outcome == "classes":
                right = int(values[best][2][row] == given["labels"][row])
                assert here["correct"].sel(policy="oracle").values[row] == right
    table = joint_table(found, against="score", resamples=50)
    np.testing.assert_allclose(
        table.loc[(2, "oracle"), "kl_gap"],
        float((found["kl"].sel(policy="oracle", keep=2) - found["kl"].sel(policy="score", keep=2)).mean()),
    )
    assert np.isnan(table["correct"]).all() == (CASES[name].outcome != "classes")
    with pytest.raises(Error, match="Policy 'taylor' is not there: there are oracle, score, pairs"):
        joint_table(found)


def test_half_precision_models_keep_their_precision():
    model, inputs = us.load("digits"), us.digits(6)
    whole = joint(model, inputs, keep=[3, 6])
    half = joint(us.load("digits").to(torch.bfloat16), inputs, keep=[3, 6])
    assert float(abs(half["kl"] - whole["kl"]).max()) < 0.05
    np.testing.assert_allclose(whole["kl"].sel(keep=6).values, 0, atol=1e-9)  # all are kept
    assert whole.attrs["model"] == "digits"
    assert np.isfinite(signals(us.load("digits").to(torch.bfloat16), inputs)["taylor"].values).all()


def test_inputs_without_a_number_are_left_out_and_counted():
    given = us.digits(4).batch(range(4))
    given["pixel_values"][1, 0, 2, 2] = torch.nan
    found = joint(us.load("digits"), given, keep=2, policies={"mine": np.ones((4, 6))})
    assert np.isnan(found["kl"].values[:, 0]).tolist() == [[False, True, False, False]] * 2
    table = joint_table(found, against="mine", resamples=10)
    assert table["left_out"].tolist() == [1, 1]
    assert np.isfinite(table["kl"]).all()


def test_many_subsets_are_streamed_and_more_are_refused():
    assert sum(len(part) for part in subsets(16, 8)) == 12_870
    assert max(len(part) for part in subsets(16, 8)) <= 4096
    model = us.load("digits")
    with pytest.raises(Error, match="A budget of 7 is not possible: of 6 units, 1 to 6 can be kept"):
        joint(model, us.digits(2), keep=[7])
    with pytest.raises(Error, match="There are 601,080,390 subsets of 16 of 32 units, beyond the limit of 200,000"):
        next(subsets(32, 16))
    with pytest.raises(Error, match="Accuracy needs a label for each input"):
        joint(model, {"pixel_values": us.digits(2).batch([0, 1])["pixel_values"]}, keep=[2], accuracy=True)
    with pytest.raises(Error, match="Budgets are whole numbers of units"):
        joint(model, us.digits(2), keep=[2.5])
    with pytest.raises(Error, match="'oracle' is taken"):
        joint(model, us.digits(2), keep=[2], policies={"oracle": np.zeros((2, 6))})
    with pytest.raises(Error, match="A label is 99, but the model has 10 classes"):
        signals(model, {**us.digits(2).batch([0, 1]), "labels": torch.tensor([1, 99])})
    with pytest.raises(Error, match="Give the budgets to keep"):
        joint(model, us.digits(2), keep=[])
    with pytest.raises(Error, match=r"The scores of 'mine' are \(3, 6\), but 2 inputs of 6 units need \(2, 6\)"):
        joint(model, us.digits(2), keep=[2], policies={"mine": np.zeros((3, 6))})


def test_the_best_set_by_utility_is_exact_and_what_is_unknown_recovers_nothing():
    chance = np.random.default_rng(3)
    S, weight = chance.normal(0.3, 0.6, (5, 6, 6)), chance.dirichlet(np.ones(6), 5)
    S[1, 2] = np.nan
    chosen = best_by_utility(S, weight, 3)
    every = np.concatenate(list(subsets(6, 3)))
    worth = utility(S, weight, every)
    np.testing.assert_array_equal(chosen, every[worth.argmax(-1)])
    assert (largest(weight, 2).sum(-1) == 2).all()
    assert largest(np.array([[1.0, np.nan, 1.0]]), 1).tolist() == [[True, False, False]]
