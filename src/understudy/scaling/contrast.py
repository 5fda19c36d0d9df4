"""Whether a difference is more than the spread: over seeds, or over inputs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Contrast:
    """A difference that a claim says is positive, with its 95% interval; NaN ends where no spread is known."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.value:+.4f}, spread unknown"
        return f"{self.value:+.4f}, {self.low:+.4f}..{self.high:+.4f}"


def over_seeds(values: Sequence[float]) -> Contrast:
    """The mean of one number a seed, with Student's interval; one seed alone has no spread.

    >>> print(over_seeds([1.0, 2.0, 3.0]))
    +2.0000, -0.4841..+4.4841

    Seeds are blocks: the models of a seed saw the same text in the same order, so a contrast is taken within each.
    """
    known = np.asarray(values, dtype=np.float64)
    mean = float(known.mean())
    if len(known) < 2 or not np.isfinite(known).all():
        return Contrast(mean, float("nan"), float("nan"))
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(known) - 1) * stats.sem(known)
    return Contrast(mean, float(mean - half), float(mean + half))


def within_seeds(found: pd.DataFrame, of: Callable[[pd.DataFrame], float]) -> Contrast:
    """A contrast of the table of `figures`, taken for each seed: `of` gets the rows of a seed, by model."""
    return over_seeds([of(rows.droplevel("seed")) for _, rows in found.groupby(level="seed")])
