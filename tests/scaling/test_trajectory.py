"""A trajectory says what plain loops over its runs say."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from scipy.stats import pearsonr, spearmanr

from understudy.errors import UnderstudyError
from understudy.organize.summary import summary
from understudy.scaling.trajectory import trajectory

INPUTS, LAYERS, HEADS = 6, (3, 7), 5


def run(step, seed=None, heads=HEADS, **attributes):
    rng = np.random.default_rng(step if seed is None else seed)
    S = rng.uniform(-0.2, 1, (INPUTS, len(LAYERS), heads, heads))
    S[:, :, range(heads), range(heads)] = np.nan
    S[0, 0, 2] = np.nan  # an invalid source
    drop = rng.uniform(1e-6, 1e-2, (INPUTS, len(LAYERS), heads))
    dims = ("input", "layer", "source", "substitute")
    coords = {"input": [f"x{n}" for n in range(INPUTS)], "layer": list(LAYERS), "source": range(heads)}
    known = {"step": step, "threshold": 1e-5, "inputs_hash": "same", "search": "grid:3", **attributes}
    return xr.Dataset({"substitutability": (dims, S), "drop": (dims[:3], drop)}, coords, known)


def test_every_figure_is_that_of_plain_loops():
    runs = [run(step, epoch=step / 10, metric=step / 100, metric_name="accuracy") for step in (10, 20, 30)]
    found = trajectory(runs[::-1])  # in any order
    assert found["step"].values.tolist() == [10, 20, 30]
    assert found["epoch"].values.tolist() == [1.0, 2.0, 3.0]
    assert found["metric"].values.tolist() == [0.1, 0.2, 0.3]
    last = runs[-1]["substitutability"].values
    off = ~np.eye(HEADS, dtype=bool)
    for at, one in enumerate(runs):
        S = one["substitutability"].values
        table = summary(one, taus=(0.25, 0.5, 0.75), resamples=0)
        for place in range(len(LAYERS)):
            a, b = np.nanmean(S[:, place], 0)[off], np.nanmean(last[:, place], 0)[off]
            here = found.isel(step=at, layer=place)
            assert float(here["similarity"]) == pytest.approx(spearmanr(a, b)[0])
            assert float(here["similarity_pearson"]) == pytest.approx(pearsonr(a, b)[0])
            first, final = means(S, last, place)
            for source in range(HEADS):
                keep = [other for other in range(HEADS) if other != source]
                expected = spearmanr(first[source, keep], final[source, keep])[0]
                assert float(here["ranking"][source]) == pytest.approx(expected)
            best = [np.nanargmax(first[i]) == np.nanargmax(final[i]) for i in range(HEADS)]
            assert float(here["agreement"]) == pytest.approx(np.mean(best))
            own = [agreed(S[x, place], last[x, place]) for x in range(INPUTS)]
            assert float(here["agreement_inputs"]) == pytest.approx(np.mean(own))
            assert float(here["raw"]) == pytest.approx(table["raw"].iloc[place])
            assert here["coverage"].values == pytest.approx([table[f"cover{tau}"].iloc[place] for tau in (25, 50, 75)])
            assert here["drop"].values == pytest.approx(one["drop"].values[:, place].mean(0))
    assert np.allclose(found["similarity"].isel(step=-1), 1)
    assert np.allclose(found["agreement"].isel(step=-1), 1)


def means(S, last, place):
    return np.nanmean(S[:, place], 0), np.nanmean(last[:, place], 0)


def agreed(a, b):
    valid = [i for i in range(HEADS) if np.isfinite(a[i]).any() and np.isfinite(b[i]).any()]
    return np.mean([np.nanargmax(a[i]) == np.nanargmax(b[i]) for i in valid])


def test_a_step_at_which_sources_barely_matter_is_warm_up():
    early, late = run(1), run(2)
    early["drop"][:] = 5e-5
    late["drop"][:] = 5e-3
    assert trajectory([early, late])["warmup"].values.tolist() == [[True, True], [False, False]]


def test_a_step_at_which_nothing_is_valid_says_nothing():
    early, late = run(1), run(2)
    early["substitutability"][:] = np.nan
    found = trajectory([early, late])
    assert np.isnan(found["similarity"].isel(step=0)).all()
    assert np.isnan(found["agreement"].isel(step=0)).all()
    assert (found["valid"].isel(step=0) == 0).all()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (run(2, heads=4), "of one architecture, but step 2 has 4 heads at layers"),
        (run(2, inputs_hash="other"), "step 2 has another probe set than step 1"),
        (run(2, search="refine"), "step 2 has another search than step 1"),
        (run(1), "has one run a step, but the steps are"),
    ],
)
def test_runs_that_do_not_belong_together_are_told(other, said):
    with pytest.raises(UnderstudyError, match=said):
        trajectory([run(1), other])


def test_a_trajectory_needs_runs():
    with pytest.raises(UnderstudyError, match="needs runs, but none were given"):
        trajectory([])
