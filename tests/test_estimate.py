"""The closed form and the screen, against refine on the bundled models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import understudy as us
from understudy.estimate import closed_form
from understudy.search import Pairs


def test_the_closed_form_is_the_best_of_its_parabola():
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(50, generator=generator).double()
    bend = torch.rand(50, generator=generator).double() * 2
    zeros = torch.zeros(50, dtype=torch.long)
    pairs = Pairs(zeros, zeros, zeros + 1, torch.ones(50).double(), 2, slope, bend)
    found, alpha = closed_form(pairs)
    delta = torch.linspace(-1, 2, 30001, dtype=torch.float64)[:, None]
    truth = -(delta * slope + 0.5 * delta**2 * bend)
    assert torch.allclose(found, truth.max(0).values.clamp(max=1.0), atol=1e-6)
    assert torch.allclose(alpha, 1 + delta[truth.argmax(0), 0], atol=1e-3)


@pytest.fixture(scope="module")
def runs():
    model, inputs = us.load("stdlib"), us.stdlib(3, length=24)
    return {name: us.measure(model, inputs, layers=[1, 3], search=name) for name in ("refine", "estimate", "screen:3")}


def test_the_estimate_is_close_and_runs_no_pair(runs):
    exact, guess = runs["refine"], runs["estimate"]
    S, E = (run["substitutability"].values for run in (exact, guess))
    there = np.isfinite(S)
    assert (np.isfinite(E) == there).all()
    assert np.corrcoef(S[there], E[there])[0, 1] > 0.9
    best, named = (np.nanmax(x, -1) for x in (S, np.where(np.nanmax(E, -1, keepdims=True) == E, S, np.nan)))
    assert named.mean() > 0.95 * best.mean()
    assert guess["damage"].isnull().all()
    assert guess.attrs["search"] == "estimate"
    assert guess.attrs["evaluations"] == 3 * 2 * (2 + 8)  # noise, and the forward of each source


def test_the_screen_finds_nearly_the_best_and_leaves_the_rest_open(runs):
    exact, some = runs["refine"], runs["screen:3"]
    S, T = (run["substitutability"].values for run in (exact, some))
    assert (np.isfinite(T).sum(-1) == 3).all()
    np.testing.assert_allclose(T[np.isfinite(T)], S[np.isfinite(T)], atol=1e-3)
    assert abs(np.nanmax(T, -1).mean() - np.nanmax(S, -1).mean()) < 0.005
    assert some.attrs["evaluations"] < exact.attrs["evaluations"] * 0.65
    table = us.summary(some, resamples=0)
    assert table["raw"].notna().all()
    assert table[["matched2", "cover50", "rank", "gap_median"]].isna().all().all()
    assert (table.loc[[1, 3], "partial"] == 3 * 8).all()


def test_a_screen_that_covers_all_is_refine():
    model, inputs = us.load("digits"), us.digits(3)
    exact, all_of_them = (us.measure(model, inputs, search=name) for name in ("refine", "screen:5"))
    np.testing.assert_array_equal(exact["substitutability"].values, all_of_them["substitutability"].values)
    with pytest.raises(us.UnderstudyError, match="at least 1 substitute, but screen:0"):
        us.measure(model, inputs, search="screen:0")


def test_trials_mend_the_estimate_where_heads_matter_much():
    model, inputs = us.load("digits"), us.digits(24)
    exact, plain, mended = (
        us.measure(model, inputs, layers=[0], search=name) for name in ("refine", "estimate", "estimate:4")
    )
    S, E, T = (run["substitutability"].values for run in (exact, plain, mended))
    best = np.nanmax(S, -1)
    got = [np.nanmax(np.where(np.nanmax(x, -1, keepdims=True) == x, S, np.nan), -1).mean() for x in (E, T)]
    assert got[1] > got[0] + 0.02
    assert got[1] > 0.93 * best.mean()
    assert mended["damage"].isnull().all()
    assert mended.attrs["evaluations"] == 24 * (2 + 6 + 6 * 4)
    with pytest.raises(us.UnderstudyError, match="is not known"):
        us.measure(model, inputs, search="estimate:-1")
