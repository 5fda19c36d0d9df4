import numpy as np
import pytest

from understudy.organize import gap, one_sided
from understudy.organize.direction import mean_known, quantile_known

from .runs import random_S


def test_gap_and_one_sided_of_every_pair():
    S = random_S(4, 3, 5, 5, invalid=0.2)
    gaps, sided = gap(S), one_sided(S, 0.25)
    assert gaps.shape == sided.shape == (4, 3, 10)
    for at in np.ndindex(4, 3):
        pairs = [(S[at][i, j], S[at][j, i]) for i in range(5) for j in range(i + 1, 5)]
        for found, side, (a, b) in zip(gaps[at], sided[at], pairs, strict=True):
            np.testing.assert_equal(found, abs(a - b))
            expected = (a > 0.25 and b <= 0) or (b > 0.25 and a <= 0)
            np.testing.assert_equal(side, np.nan if np.isnan(a + b) else float(expected))
    assert set(np.unique(sided[~np.isnan(sided)])) == {0.0, 1.0}


def test_direction_is_lost_in_the_transpose():
    S = random_S(6, 6, seed=2)
    np.testing.assert_array_equal(gap(S), gap(S.T))
    np.testing.assert_array_equal(one_sided(S, 0.1), one_sided(S.T, 0.1))
    np.testing.assert_array_equal(gap((S + S.T) / 2), np.zeros(15))


def test_zero_is_what_counts_as_no_substitution():
    S = np.array([[np.nan, 0.3], [5e-4, np.nan]])
    assert one_sided(S, 0.1) == 0.0
    assert one_sided(S, 0.1, zero=1e-3) == 1.0
    assert one_sided(S, 0.3, zero=1e-3) == 0.0  # the level must be exceeded


def test_the_level_is_exceeded_in_the_precision_of_S():
    S = np.array([[0, 0.1], [0, 0]], dtype=np.float32)  # as a float64 this is more than 0.1
    assert one_sided(S, 0.1) == 0.0


def test_a_pair_with_an_invalid_source_is_left_out():
    S = random_S(3, 3)
    S[2] = np.nan
    np.testing.assert_array_equal(np.isnan(gap(S)), [False, True, True])
    np.testing.assert_array_equal(np.isnan(one_sided(S, 0.1)), [False, True, True])


@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_quantile_and_mean_of_what_is_known(q):
    values = np.random.default_rng(0).normal(size=(50, 9))
    values[np.random.default_rng(1).random(values.shape) < 0.5] = np.nan
    values[0] = np.nan
    for row, found, mean in zip(values, quantile_known(values, q), mean_known(values), strict=True):
        known = row[~np.isnan(row)]
        assert found == pytest.approx(np.quantile(known, q) if len(known) else np.nan, nan_ok=True)
        assert mean == pytest.approx(known.mean() if len(known) else np.nan, nan_ok=True)


def test_no_pairs_no_quantile():
    assert np.isnan(quantile_known(gap(np.full((3, 1, 1), np.nan)), 0.5)).all()
