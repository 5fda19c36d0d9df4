import numpy as np
import pytest
from pandas.testing import assert_frame_equal

from understudy.errors import UnderstudyError
from understudy.organize import compare, summary

from .runs import as_run, random_S

pytestmark = pytest.mark.filterwarnings("error")

METRICS = ("raw", "matched2", "cover50", "cover50_exempt", "rank")


@pytest.fixture(scope="module")
def S():
    return random_S(20, 3, 5, 5, invalid=0.1, seed=7)


def test_a_run_differs_from_itself_by_nothing(S):
    found = compare(as_run(S), as_run(S), resamples=100)
    ends = ["", "_low", "_high"]
    assert (found[[f"{name}_b_minus_a{end}" for name in METRICS for end in ends]] == 0).all(axis=None)
    assert (found["raw_a"] > 0).all()


def test_differences_are_b_minus_a(S):
    a, b = as_run(S), as_run(S**2, model="other", search="refine")
    found = compare(a, b, resamples=100)
    of_a, of_b = summary(a, resamples=0), summary(b, resamples=0)
    for name in METRICS:
        np.testing.assert_allclose(found[f"{name}_a"], of_a[name])
        np.testing.assert_allclose(found[f"{name}_b"], of_b[name])
        np.testing.assert_allclose(found[f"{name}_b_minus_a"], of_b[name] - of_a[name])
    assert (found["raw_b_minus_a_high"] < 0).all()
    assert (found["cover50_b_minus_a"] > 0).all()
    np.testing.assert_array_equal(found["invalid_a"], of_a["invalid"])
    assert (found["inputs"] == 20).all()
    assert found.attrs["difference"] == "b minus a"
    assert found.attrs["b"]["model"] == "other"


def test_turning_the_runs_around_turns_the_sign(S):
    a, b = as_run(S), as_run(random_S(20, 3, 5, 5, seed=8))
    there, back = compare(a, b, resamples=200), compare(b, a, resamples=200)
    for name in METRICS:
        np.testing.assert_allclose(there[f"{name}_b_minus_a"], -back[f"{name}_b_minus_a"])
        np.testing.assert_allclose(there[f"{name}_b_minus_a_low"], -back[f"{name}_b_minus_a_high"])


def test_inputs_are_paired_by_id(S):
    a, b = as_run(S), as_run(S**2)
    order = np.random.default_rng(1).permutation(20)
    assert_frame_equal(compare(a, b.isel(input=order), resamples=50), compare(a, b, resamples=50))


def test_pairing_narrows_the_interval_of_correlated_runs(S):
    shift = np.random.default_rng(2).normal(scale=0.02, size=S.shape)
    a, b = as_run(S), as_run(S + shift)
    paired = compare(a, b)
    # Were b other inputs, the error of the difference would be made of both errors.
    of_a, of_b = summary(a), summary(b, seed=1)
    for name in ("raw", "matched2", "rank"):
        width = paired[f"{name}_b_minus_a_high"] - paired[f"{name}_b_minus_a_low"]
        alone = [of[f"{name}_high"] - of[f"{name}_low"] for of in (of_a, of_b)]
        assert (width < 0.5 * np.hypot(*alone)).all(), name


def test_layers_in_common_are_compared_and_units_may_differ(S):
    a = as_run(S, layers=[3, 7, 11])
    b = as_run(random_S(20, 3, 8, 8, seed=1), layers=[7, 11, 15])
    found = compare(a, b, resamples=20)
    assert found.index.tolist() == [7, 11, "all"]
    expected = summary(b.sel(layer=[7, 11]), resamples=0)["raw"] - summary(a.sel(layer=[7, 11]), resamples=0)["raw"]
    np.testing.assert_allclose(found["raw_b_minus_a"], expected)


def test_all_is_over_layers_that_both_runs_can_speak_of(S):
    lost = S**2
    lost[:, 1] = np.nan
    found = compare(as_run(S), as_run(lost), resamples=20)
    assert np.isnan(found.loc[1, "raw_b_minus_a"])
    assert found.loc[1, "raw_a"] > 0
    assert found.loc["all", "raw_a"] == pytest.approx(found.loc[[0, 2], "raw_a"].mean())
    assert found.loc["all", "raw_b_minus_a"] == pytest.approx(found.loc[[0, 2], "raw_b_minus_a"].mean())
    assert found.loc["all", "raw_b_minus_a_low"] < found.loc["all", "raw_b_minus_a"]


def test_one_input_has_no_interval(S):
    found = compare(as_run(S[:1]), as_run(S[:1] ** 2))
    assert (found["raw_b_minus_a"] < 0).all()
    assert found[["raw_b_minus_a_low", "raw_b_minus_a_high"]].isna().all(axis=None)


def test_other_inputs_are_refused(S):
    a = as_run(S[:3], inputs=["x", "y", "z"])
    with pytest.raises(UnderstudyError, match=r"of 3 in a and 2 in b 2 are common \(only in a: z\)\. Measure both"):
        compare(a, a.isel(input=[0, 1]))
    b = as_run(S[:9], inputs=["x", *"abcdefgh"])
    with pytest.raises(UnderstudyError, match=r"1 are common \(only in a: y, z; only in b: a, b, c, d, e and 3 more\)"):
        compare(a, b)
    with pytest.raises(UnderstudyError, match="run b holds 'x' more than once"):
        compare(a, as_run(S[:3], inputs=["x", "y", "x"]))


def test_other_layers_are_refused(S):
    with pytest.raises(UnderstudyError, match=r"No layer is common: a has \[0, 1, 2\], b has \[5, 6, 7\]"):
        compare(as_run(S), as_run(S, layers=[5, 6, 7]))


@pytest.mark.parametrize(("key", "other"), [("units", "kv"), ("outcome", "next tokens"), ("threshold", 1e-3)])
def test_other_protocols_are_refused(S, key, other):
    with pytest.raises(UnderstudyError, match=rf"{key} is .* in a and {other!r} in b.*may differ, units, outcome"):
        compare(as_run(S), as_run(S, **{key: other}))


def test_what_is_no_run_is_refused(S):
    with pytest.raises(UnderstudyError, match="but this is dict"):
        compare(as_run(S), {})
