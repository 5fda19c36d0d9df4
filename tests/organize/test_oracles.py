from itertools import combinations

import numpy as np
import pytest

from understudy.errors import UnderstudyError
from understudy.organize import matched_oracle, raw_oracle

from .runs import random_S


def test_raw_is_the_best_of_the_other_units():
    S = random_S(3, 2, 5, 5, invalid=0.3)
    S[..., np.arange(5), np.arange(5)] = 9.0  # what stands on the diagonal must not matter
    found = raw_oracle(S)
    for at in np.ndindex(found.shape):
        others = [S[at][j] for j in range(5) if j != at[-1]]
        np.testing.assert_equal(found[at], np.nan if np.isnan(others).all() else max(others))
    assert np.isnan(found).any()


@pytest.mark.parametrize("H", [2, 3, 5, 7])
def test_matched_is_the_mean_over_all_candidate_sets(H):
    S = random_S(4, H, H, seed=H)
    for m in range(1, H):
        for at in np.ndindex(4, H):
            others = [S[at][j] for j in range(H) if j != at[-1]]
            listed = [max(chosen) for chosen in combinations(others, m)]
            assert matched_oracle(S, m)[at] == pytest.approx(np.mean(listed), abs=1e-12)


def test_matched_equals_raw_once_all_candidates_are_in_the_set():
    S = random_S(6, 4, 4, invalid=0.2)
    for m in (3, 4, 50):
        np.testing.assert_allclose(matched_oracle(S, m), raw_oracle(S), atol=1e-15)
    assert (matched_oracle(S, 2) < raw_oracle(S)).any()


def test_what_was_not_run_leaves_raw_and_takes_matched():
    S = random_S(4, 4, seed=3)
    S[1, 2] = np.nan
    S[3] = np.nan
    assert raw_oracle(S)[1] == max(S[1, 0], S[1, 3])
    np.testing.assert_array_equal(np.isnan(raw_oracle(S)), [False, False, False, True])
    np.testing.assert_array_equal(np.isnan(matched_oracle(S, 2)), [False, True, False, True])
    np.testing.assert_array_equal(np.isnan(matched_oracle(S, 9)), [False, True, False, True])


def test_a_negative_best_substitute_is_not_raised_to_zero():
    S = np.array([[np.nan, -0.5, -0.2], [0.1, np.nan, 0.2], [0.0, 0.0, np.nan]])
    assert raw_oracle(S)[0] == -0.2


def test_a_unit_alone_has_no_oracle():
    S = np.full((2, 1, 1), np.nan)
    assert np.isnan(raw_oracle(S)).all()
    assert matched_oracle(S, 2).shape == (2, 1)
    assert np.isnan(matched_oracle(S, 2)).all()


@pytest.mark.parametrize("m", [0, -1, 1.5])
def test_a_set_must_hold_a_candidate(m):
    with pytest.raises(UnderstudyError, match=rf"cannot have size {m}: give a whole number, matched >= 1"):
        matched_oracle(random_S(3, 3), m)


def test_sources_and_substitutes_are_the_same_units():
    with pytest.raises(UnderstudyError, match=r"shape \(2, 3\).*give \[..., H, H\]"):
        raw_oracle(np.zeros((2, 3)))
