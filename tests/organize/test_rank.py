import numpy as np
import pytest

from understudy.organize import effective_rank

from .runs import random_S


def directly(S):
    """The effective rank of one matrix, from the eigenvalues of F transposed times F."""
    H = len(S)
    F = np.zeros((H, H))
    for i in range(H):
        if not np.isnan(np.delete(S[i], i)).all():
            F[i] = [1.0 if i == j else min(max(S[i, j], 0.0), 1.0) for j in range(H)]
    sigma = np.sqrt(np.maximum(np.linalg.eigvalsh(F.T @ F), 0))
    p = sigma / sigma.sum()
    return np.exp(-sum(x * np.log(x) for x in p if x > 0))


def test_rank_is_that_of_each_matrix_alone():
    S = random_S(5, 3, 6, 6, invalid=0.2) - 0.1
    found = effective_rank(S)
    assert found.shape == (5, 3)
    for at in np.ndindex(5, 3):
        assert found[at] == pytest.approx(directly(S[at]), rel=1e-6)


@pytest.mark.parametrize("H", [2, 6, 12])
def test_rank_runs_from_one_to_all(H):
    assert effective_rank(np.full((H, H), 0.0)) == pytest.approx(H)
    assert effective_rank(np.full((H, H), -2.0)) == pytest.approx(H)
    assert effective_rank(np.full((H, H), 1.0)) == pytest.approx(1)
    assert effective_rank(np.full((H, H), 7.0)) == pytest.approx(1)


def test_two_teams_of_equals_count_as_two():
    S = np.kron(np.eye(2), np.ones((3, 3)))
    assert effective_rank(S) == pytest.approx(2)


def test_invalid_sources_span_nothing():
    S = np.zeros((5, 5))
    S[[1, 4]] = np.nan
    assert effective_rank(S) == pytest.approx(3)


def test_nothing_is_said_without_valid_sources_or_with_pairs_not_run():
    S = random_S(3, 4, 4)
    S[0] = np.nan
    S[1, 2, 0] = np.nan
    np.testing.assert_array_equal(np.isnan(effective_rank(S)), [True, True, False])
