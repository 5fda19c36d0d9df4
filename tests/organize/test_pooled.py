import numpy as np
import pytest

from understudy.organize.bootstrap import interval
from understudy.organize.pooled import Ranked, pooled_mean, pooled_quantile


@pytest.fixture(params=[1, 3, 40], ids=["one", "few", "many"])
def values(request):
    """Values of 12 inputs at two layers, some of them NaN and many equal."""
    rng = np.random.default_rng(request.param)
    made = rng.integers(0, 30, (2, 12, request.param)) / 7
    made[rng.random(made.shape) < 0.3] = np.nan
    made[0, 4] = np.nan
    return made


def draws_of(inputs, resamples=40):
    """Draws with replacement, and some that hold one input only."""
    rng = np.random.default_rng(5)
    drawn = rng.multinomial(inputs, np.full(inputs, 1 / inputs), size=resamples)
    return np.concatenate([drawn, np.eye(inputs, dtype=int), np.ones((1, inputs), dtype=int)]).astype(float)


def plainly(values, draws, statistic):
    """The statistic of the drawn inputs, each written out as often as it was drawn."""
    result = np.full((len(values), len(draws)), np.nan)
    for layer, of_layer in enumerate(values):
        for at, times in enumerate(draws):
            drawn = np.repeat(of_layer, times.astype(int), axis=0)
            if (known := drawn[~np.isnan(drawn)]).size:
                result[layer, at] = statistic(known)
    return result


def test_mean_of_draws_is_the_mean_of_what_was_drawn(values):
    draws = draws_of(12)
    np.testing.assert_allclose(pooled_mean(values)(draws), plainly(values, draws, np.mean), atol=1e-12)


@pytest.mark.parametrize("q", [0.0, 0.5, 0.75, 1.0])
def test_quantile_of_draws_is_the_quantile_of_what_was_drawn(values, q):
    draws = draws_of(12)
    found = pooled_quantile([Ranked(layer) for layer in values], q)(draws)
    np.testing.assert_allclose(found, plainly(values, draws, lambda drawn: np.quantile(drawn, q)), atol=1e-12)


def test_quantile_of_a_layer_without_values_is_nan():
    assert np.isnan(Ranked(np.full((3, 2), np.nan)).quantile(np.ones((2, 3)), 0.5)).all()


def test_interval_of_a_mean_has_the_width_of_the_normal_one():
    values = np.random.default_rng(0).normal(size=(1, 400, 1))
    low, high = interval(pooled_mean(values), 400, resamples=4000)
    error = values.std() / np.sqrt(400)
    assert (high - low)[0] == pytest.approx(2 * 1.96 * error, rel=0.08)
    assert (low + high)[0] / 2 == pytest.approx(values.mean(), abs=0.1 * error)


def test_batches_do_not_change_the_interval(monkeypatch):
    statistic = pooled_mean(np.random.default_rng(0).normal(size=(1, 30, 2)))
    whole = interval(statistic, 30, resamples=200)
    monkeypatch.setattr("understudy.organize.bootstrap.HELD", 30 * 7)
    np.testing.assert_allclose(interval(statistic, 30, resamples=200), whole, rtol=1e-12)
