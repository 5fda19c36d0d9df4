"""Calibration: when units go, those that stay and stand in for them become louder. Pure."""

from __future__ import annotations

import numpy as np

MOST = 3.0


def calibrated(retained: np.ndarray, S: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Gates of a retained subset whose units make up for those that went.

    Each removed i goes to its best retained j(i), and `g_j = clip(1 + Σ over its i of (alpha_ij − 1), 0, 3)`.

    >>> S = np.array([[[0.0, 0.2, 0.9], [0.1, 0.0, 0.4], [0.0, 0.0, 0.0]]])
    >>> alpha = np.full((1, 3, 3), 1.5)
    >>> calibrated(np.array([[False, False, True]]), S, alpha)
    array([[0., 0., 2.]])

    retained: bool `[inputs, units]`. S, alpha: `[inputs, source, substitute]`. A removed unit that nobody stands in for
    (no S above zero) changes no other one.
    """
    count, units = retained.shape
    reach = np.where(retained[:, None], np.nan_to_num(S, nan=-np.inf), -np.inf)  # [inputs, source, substitute]
    by = reach.argmax(-1)  # [inputs, source]
    counts = ~retained & (np.take_along_axis(reach, by[..., None], -1)[..., 0] > 0)
    more = np.where(counts, np.take_along_axis(alpha, by[..., None], -1)[..., 0] - 1, 0.0)
    gates = np.ones((count, units))
    np.add.at(gates, (np.arange(count)[:, None], by), np.nan_to_num(more))
    return np.where(retained, gates.clip(0, MOST), 0.0)
