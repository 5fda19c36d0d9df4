"""Intervals by resampling inputs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from understudy.errors import UnderstudyError
from understudy.organize.pooled import Array, Statistic

# Drawn inputs held at once: 4 MB, whatever the number of resamples.
HELD = 1 << 19


def value(statistic: Statistic, inputs: int) -> Array:
    """Return the statistic of the inputs themselves: each drawn once."""
    return statistic(np.ones((1, inputs)))[..., 0]


def interval(
    statistic: Statistic, inputs: int, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[Array, Array]:
    """Return the low and high ends of a percentile bootstrap interval over inputs.

    >>> values = np.array([1.0, 2.0, 3.0, 4.0])
    >>> low, high = interval(lambda draws: draws @ values / 4, 4)
    >>> float(low), float(high)
    (1.5, 3.5)

    The same inputs are drawn for all numbers of the statistic. The ends are NaN where there is one input only,
    where `resamples` is 0, and where some resample leaves nothing to say.

    Args:
        statistic: takes draws `[resamples, inputs]` and returns `[..., resamples]`.
        inputs: the number of inputs.
        confidence: the share of resamples inside, in (0, 1).
        resamples: how many times the inputs are drawn.
        seed: the same seed gives the same interval.

    """
    if not 0 < confidence < 1:
        raise UnderstudyError(f"confidence is {confidence}, but is a share in (0, 1): give 0.95 for a 95% interval.")
    if resamples < 0:
        raise UnderstudyError(f"resamples is {resamples}: give some 2000, or 0 for no intervals.")
    if inputs < 2 or resamples == 0:
        nothing = np.full(value(statistic, inputs).shape, np.nan)
        return nothing, nothing

    def of_drawn(index: NDArray[np.int64], axis: int) -> Any:
        assert axis == -1
        at = np.arange(len(index))[:, None] * inputs + index  # [resamples, inputs], one bin for each resample and input
        return statistic(np.bincount(at.ravel(), minlength=index.size).reshape(index.shape).astype(np.float64))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # said by the NaN itself
        ends = stats.bootstrap(
            (np.arange(inputs),),
            of_drawn,
            n_resamples=resamples,
            batch=max(1, HELD // inputs),
            vectorized=True,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return ends.low, ends.high
