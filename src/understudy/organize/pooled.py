"""A layer's numbers as functions of how often each input was drawn.

Resampling inputs does not change their values, only how often each one counts. So a statistic here takes `draws`,
`[resamples, inputs]`, and returns `[layers, resamples]`: draws of one give the number itself, and thousands of
resamples are a few products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]

# Few enough that the tallies stay small beside the values, many enough that one block is quick to walk.
BLOCKS = 128


def pooled_mean(layers: Sequence[Array]) -> Statistic:
    """Return the mean over all values of the drawn inputs that are not NaN.

    >>> mean = pooled_mean([np.array([[1.0, np.nan], [2.0, 3.0]])])
    >>> mean(np.array([[1.0, 1.0], [2.0, 0.0]]))
    array([[2., 1.]])

    It weighs every value the same, not every input: an input with more values counts more.

    Args:
        layers: for each layer the values, `[inputs, ...]`.

    """
    flat = [values.reshape(len(values), -1) for values in layers]
    total = np.stack([np.where(np.isnan(values), 0.0, values).sum(axis=1) for values in flat], axis=1)
    count = np.stack([(~np.isnan(values)).sum(axis=1) for values in flat], axis=1).astype(np.float64)

    def mean(draws: Array) -> Array:
        with np.errstate(invalid="ignore"):  # 0 / 0: no value among the drawn inputs, which is NaN
            ratio: Array = (draws @ total) / (draws @ count)
        return ratio.T

    return mean


class Ranked:
    """The values of one layer, `[inputs, ...]`, in rising order and each with its input; NaN is left out.

    Sorting anew for each resample would dominate the summary. The values are sorted once and cut into blocks
    whose tallies say how many each input has there; a product with the draws finds the block that holds a rank,
    and only that block is walked.
    """

    def __init__(self, values: Array) -> None:
        flat = values.reshape(len(values), -1)
        owner, _ = known = np.nonzero(~np.isnan(flat))
        order = np.argsort(flat[known], kind="stable")
        self.rising, self.owner = flat[known][order], owner[order]
        self.width = max(1, -(-len(order) // BLOCKS))
        block = np.arange(len(order)) // self.width
        self.tally = np.bincount(self.owner * BLOCKS + block, minlength=len(flat) * BLOCKS).reshape(-1, BLOCKS) * 1.0

    def quantile(self, draws: Array, q: float) -> Array:
        """Return the quantile of each resample, NaN where nothing was drawn."""
        if not len(self.rising):
            return np.full(len(draws), np.nan)
        until = np.cumsum(draws @ self.tally, axis=1)  # [resamples, blocks]
        place = q * np.maximum(until[:, -1] - 1, 0)
        low = np.floor(place)
        below, above = self._at(draws, until, low), self._at(draws, until, np.ceil(place))
        return np.where(until[:, -1] > 0, below + (place - low) * (above - below), np.nan)

    def _at(self, draws: Array, until: Array, rank: Array) -> Array:
        """Return the value of a rank (from 0) among the drawn values, for each resample."""
        block = np.minimum((until <= rank[:, None]).sum(axis=1), BLOCKS - 1)  # [resamples]
        before = np.where(block > 0, np.take_along_axis(until, np.maximum(block - 1, 0)[:, None], 1)[:, 0], 0)
        place = np.minimum(block[:, None] * self.width + np.arange(self.width), len(self.rising) - 1)
        inside = np.cumsum(np.take_along_axis(draws, self.owner[place], 1), axis=1)  # [resamples, width]
        step = np.minimum((inside <= (rank - before)[:, None]).sum(axis=1), self.width - 1)
        found: Array = self.rising[np.take_along_axis(place, step[:, None], 1)[:, 0]]
        return found


def pooled_quantile(layers: Sequence[Ranked], q: float) -> Statistic:
    """Return the quantile (linear between ranks) over all values of the drawn inputs that are not NaN.

    >>> median = pooled_quantile([Ranked(np.array([[1.0, np.nan], [2.0, 9.0]]))], 0.5)
    >>> median(np.array([[1.0, 1.0], [1.0, 0.0]]))
    array([[2., 1.]])

    Args:
        layers: the ranked values of each layer.
        q: in [0, 1]; 0.5 is the median.

    """
    return lambda draws: np.stack([layer.quantile(draws, q) for layer in layers])
