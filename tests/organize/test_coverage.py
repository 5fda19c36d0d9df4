from itertools import combinations

import numpy as np
import pytest

from understudy.errors import UnderstudyError
from understudy.organize import coverage, representatives
from understudy.organize.smallest_cover import _list, _solve, smallest_cover

from .runs import random_S


def covered(S, R, tau, invalid):
    """Whether the set R covers every unit, by the definition."""
    for i in range(len(S)):
        alone = np.isnan(np.delete(S[i], i)).all()
        if i in R or (alone and invalid == "exempt"):
            continue
        if not any(S[i, j] >= tau for j in R):
            return False
    return True


def listed(S, tau, invalid):
    """All smallest sets, by trying every subset."""
    H = len(S)
    for size in range(H + 1):
        found = [set(R) for R in combinations(range(H), size) if covered(S, R, tau, invalid)]
        if found:
            return found
    raise AssertionError


def greedy(covers):
    """The number of columns that the greedy rule takes."""
    left, taken = np.ones(len(covers), dtype=bool), 0
    while left.any():
        left &= ~covers[:, np.argmax(covers[left].sum(axis=0))]
        taken += 1
    return taken


def random_covers(count, H, density, seed):
    covers = np.random.default_rng(seed).random((count, H, H)) < density
    return covers | np.eye(H, dtype=bool)


@pytest.mark.parametrize("invalid", ["retain", "exempt"])
@pytest.mark.parametrize("H", [2, 4, 5, 6, 7])
def test_coverage_is_the_smallest_of_all_subsets(H, invalid):
    S = random_S(25, H, H, seed=H, invalid=0.2)
    for tau in (0.4, 0.75):
        sizes, sets = coverage(S, tau, invalid=invalid), representatives(S, tau, invalid=invalid)
        for at, one in enumerate(S):
            if np.isnan(one).all():
                assert np.isnan(sizes[at])
                assert not sets[at].any()
                continue
            best = listed(one, tau, invalid)
            assert sizes[at] == len(best[0]) / H
            assert set(np.flatnonzero(sets[at])) in best


@pytest.mark.parametrize("limit", [0, 20])
def test_ties_go_to_the_units_that_cover_most_then_come_first(limit):
    covers = random_covers(60, 6, 0.3, seed=8)
    found = smallest_cover(covers, listed=limit)
    ties = 0
    for matrix, mask in zip(covers, found, strict=True):
        S = np.where(matrix, 1.0, 0.0)
        place = {unit: rank for rank, unit in enumerate(sorted(range(6), key=lambda j, m=matrix: (-m[:, j].sum(), j)))}
        best = sorted(listed(S, 0.5, "retain"), key=lambda R: sorted(place[unit] for unit in R))
        ties += len(best) > 1
        assert set(np.flatnonzero(mask)) == best[0]
    assert ties > 20


@pytest.mark.parametrize(("H", "density"), [(5, 0.2), (8, 0.2), (12, 0.3), (16, 0.15)])
def test_listing_and_integer_programming_agree(H, density):
    covers = random_covers(10, H, density, seed=H)
    np.testing.assert_array_equal(_list(covers), np.stack([_solve(matrix) for matrix in covers]))
    np.testing.assert_array_equal(smallest_cover(covers, listed=0), smallest_cover(covers, listed=20))


def test_reduction_changes_neither_the_size_nor_the_choice():
    covers = random_covers(300, 9, 0.2, seed=3)
    covers = np.take_along_axis(covers, np.argsort(-covers.sum(axis=1), axis=1, kind="stable")[:, None, :], axis=2)
    np.testing.assert_array_equal(smallest_cover(covers), _list(covers))


def test_the_exact_cover_is_never_larger_than_the_greedy_one_and_at_times_smaller():
    covers = np.concatenate([random_covers(150, 12, density, seed=1) for density in (0.1, 0.2, 0.3)])
    found = smallest_cover(covers)
    assert (covers & found[:, None, :]).any(axis=2).all()
    by_greedy = np.array([greedy(matrix) for matrix in covers])
    assert (found.sum(axis=1) <= by_greedy).all()
    assert (found.sum(axis=1) < by_greedy).any()


@pytest.mark.parametrize(("H", "width"), [(13, 3), (24, 5), (64, 7)])
def test_a_ring_needs_one_unit_for_each_stretch(H, width):
    # Unit j stands in for itself and the width - 1 units after it: nothing is forced or dominated, and H / width
    # units, rounded up, are needed.
    S = np.zeros((H, H))
    for step in range(1, width):
        S[(np.arange(H) + step) % H, np.arange(H)] = 0.9
    assert coverage(S, 0.5) == -(-H // width) / H


def test_more_than_64_rows_are_covered_too():
    covers = np.random.default_rng(0).random((3, 80, 8)) < 0.4
    covers[~covers.any(axis=2)] = True
    for matrix, mask in zip(covers, smallest_cover(covers), strict=True):
        sizes = [k for k in range(9) for R in combinations(range(8), k) if matrix[:, list(R)].any(axis=1).all()]
        assert matrix[:, mask].any(axis=1).all()
        assert mask.sum() == min(sizes)


def test_a_hub_is_enough_and_without_substitutes_all_stay():
    S = np.zeros((5, 5))
    assert coverage(S, 0.5) == 1.0
    S[:, 3] = 0.5
    np.testing.assert_array_equal(representatives(S, 0.5), [False, False, False, True, False])
    assert coverage(S, 0.51) == 1.0


def test_an_invalid_unit_can_stand_in_for_others():
    S = np.zeros((4, 4))
    S[:, 2] = 0.8
    S[2] = np.nan
    np.testing.assert_array_equal(representatives(S, 0.5), [False, False, True, False])
    np.testing.assert_array_equal(representatives(S, 0.5, invalid="exempt"), [False, False, True, False])
    S[1] = np.nan
    assert coverage(S, 0.5) == 2 / 4
    assert coverage(S, 0.5, invalid="exempt") == 1 / 4


def test_exempting_never_needs_more_and_is_the_same_where_all_are_valid():
    S = random_S(300, 8, 8, invalid=0.1)
    retained, exempt = coverage(S, 0.6), coverage(S, 0.6, invalid="exempt")
    assert (exempt <= retained).all()
    assert (exempt < retained).any()
    whole = ~np.isnan(S).all(axis=-1).any(axis=-1)
    assert whole.any()
    np.testing.assert_array_equal(exempt[whole], retained[whole])


def test_a_higher_threshold_never_needs_fewer():
    S = random_S(100, 9, 9, invalid=0.1)
    sizes = np.stack([coverage(S, tau) for tau in (0.2, 0.4, 0.6, 0.8, 1.0)])
    assert (np.diff(sizes, axis=0) >= 0).all()
    assert sizes[0].mean() < sizes[-1].mean()


def test_leading_axes_and_company_do_not_matter():
    S = random_S(4, 3, 7, 7, invalid=0.1)
    S[2] = S[1]
    sets = representatives(S, 0.5)
    assert sets.shape == (4, 3, 7)
    for at in np.ndindex(4, 3):
        np.testing.assert_array_equal(sets[at], representatives(S[at], 0.5))


def test_the_threshold_is_met_in_the_precision_of_S():
    S = np.full((3, 3), 0.7, dtype=np.float32)  # as a float64 this is less than 0.7
    assert coverage(S, 0.7) == pytest.approx(1 / 3)


def test_what_was_not_run_is_not_taken_for_no_substitute():
    S = random_S(3, 5, 5)
    S[1, 2, 4] = np.nan
    for invalid in ("retain", "exempt"):
        np.testing.assert_array_equal(np.isnan(coverage(S, 0.5, invalid=invalid)), [False, True, False])


def test_nothing_is_said_of_a_layer_without_valid_sources():
    assert np.isnan(coverage(np.full((4, 4), np.nan), 0.5))
    assert np.isnan(coverage(np.full((1, 1), np.nan), 0.5, invalid="exempt"))


@pytest.mark.parametrize("tau", [0.0, -0.5, 1.01, float("nan")])
def test_a_threshold_outside_the_unit_interval_is_refused(tau):
    with pytest.raises(UnderstudyError, match=rf"tau is {tau}.*\(0, 1\].*0\.5"):
        coverage(random_S(3, 3), tau)


def test_an_unknown_reading_is_refused():
    with pytest.raises(UnderstudyError, match=r"invalid is 'drop'.*'retain', 'exempt'"):
        coverage(random_S(3, 3), 0.5, invalid="drop")
