"""Slopes against finite differences, and the continuous search against known valleys and against the grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import understudy as us
from families import CASES, HEADS, batch, build
from understudy.anatomy import anatomy
from understudy.capture import capture
from understudy.outcome import reads, resolve
from understudy.refine import Refine
from understudy.resume import Suffix
from understudy.search import Pairs
from understudy.surgery import opened


@pytest.mark.parametrize("budget", [2**30, 1])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_slopes_equal_finite_differences(name, layer, budget):
    model, inputs = build(name), batch(name)
    body = anatomy(model)
    with opened(model):
        taken = capture(body, inputs, [layer])
        read = reads(body, taken, resolve(body, "auto"), list("abcd"))
        suffix = Suffix(body, taken, layer, read, dtype=torch.float64, budget=budget)
        owner = torch.tensor([0, 0, 1, 3])
        gates = torch.rand(4, HEADS, generator=torch.Generator().manual_seed(0)).double()
        found, slopes = suffix.slopes(gates, owner)
        assert torch.allclose(found, suffix.resume(gates, owner), rtol=1e-6)
        step = 1e-3  # some families take their norms in float32 whatever the model's precision
        for unit in range(HEADS):
            nudge = torch.zeros(HEADS, dtype=torch.float64)
            nudge[unit] = step
            rise = suffix.resume(gates + nudge, owner) - suffix.resume(gates - nudge, owner)
            assert torch.allclose(slopes[:, unit], rise / (2 * step), rtol=1e-2, atol=1e-4)
    assert all(p.requires_grad for p in model.parameters())


def search(valley, count=200):
    generator = torch.Generator().manual_seed(1)
    least = 3.4 * torch.rand(count, generator=generator).double() - 0.2  # some valleys lie beyond the bounds
    calls = []

    def value(which, alpha):
        return valley(alpha, least[which])

    one = torch.ones(count, dtype=torch.float64)
    every = torch.arange(count)
    slope = (value(every, one + 1e-6) - value(every, one - 1e-6)) / 2e-6
    pairs = Pairs(
        every, torch.zeros(count).long(), torch.ones(count).long(), value(every, one), 2, slope, torch.ones(count)
    )

    def evaluate(gates, owner):
        calls.append(len(owner))
        return value(owner, gates[:, 1])

    found = Refine().best(pairs, evaluate)
    damage, alpha = found.damage, found.compensation
    grid = torch.linspace(0, 3, 3001, dtype=torch.float64)
    truth = torch.stack([value(every, point.expand(count)) for point in grid]).min(0).values
    return damage, alpha, truth, pairs.drop, sum(calls) / count, value(every, alpha)


@pytest.mark.parametrize(
    "valley",
    [
        lambda x, m: 0.02 + 0.03 * (x - m) ** 2,
        lambda x, m: 0.02 + 0.01 * torch.cosh(2 * (x - m)),
        lambda x, m: 0.02 + 0.05 * torch.log1p((x - m) ** 2),
        lambda x, m: 0.02 + 0.01 * (torch.exp(x - m) - (x - m)),
    ],
    ids=["parabola", "steep", "flat", "lopsided"],
)
def test_one_valley_is_found_in_few_evaluations(valley):
    damage, alpha, truth, drop, evaluations, there = search(valley)
    assert evaluations <= 7
    assert ((alpha >= 0) & (alpha <= 3)).all()
    assert torch.equal(damage, there), "every D* was run at its alpha"
    missed = (damage - truth) / drop
    assert missed.max() <= 5e-3
    assert (missed > 1e-3).double().mean() <= 0.02
    assert (damage <= drop).all()


@pytest.mark.parametrize("name", ["digits", "stdlib"])
def test_refine_is_as_exact_as_the_grid_with_a_fifth_of_the_work(name):
    model = us.load(name)
    inputs = us.digits(12) if name == "digits" else us.stdlib(2, length=24)
    grid = us.measure(model, inputs, layers=[1, 3], search="grid:31")
    fine = us.measure(model, inputs, layers=[1, 3], search="refine")
    a, b = (run["substitutability"].values for run in (grid, fine))
    there = np.isfinite(a)
    assert (np.isfinite(b) == there).all()
    assert (b >= a - 1e-4)[there].mean() >= 0.995
    assert (b - a)[there].mean() > 0  # a grid misses the least between its points
    assert fine.attrs["evaluations"] <= grid.attrs["evaluations"] / 5
    assert fine.attrs["zero"] == 1e-3


@pytest.mark.parametrize("search", ["refine", "screen:5", "estimate", "estimate:5"])
def test_a_dead_head_stands_in_for_nobody(search):
    model = us.load("digits")
    layer = anatomy(model).layers[-1]
    with torch.no_grad():
        layer.site.weight[:, 2 * layer.width : 3 * layer.width] = 0.0
    run = us.measure(model, us.digits(4), search=search)
    S = run["substitutability"].values[:, 0]
    others = [0, 1, 3, 4, 5]
    assert np.isnan(S[:, 2]).all(), "without effect it is no valid source"
    assert (np.abs(S[:, others, 2]) < 1e-4).all(), "level ground: nothing to gain, and a number all the same"
    assert (np.nanmax(S[:, others], -1) > 0.01).all(), "the other substitutes are found as ever"


def test_a_search_of_ones_own_is_not_taken_for_the_default():
    assert Refine().name == "refine"
    assert Refine(rounds=1).name == "refine(rounds=1)"
