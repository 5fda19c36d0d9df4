"""How far substitution depends on the input: switching, and agreement under perturbations. Pure."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from understudy.errors import UnderstudyError
from understudy.lens.proxies import within_source
from understudy.organize.organization import measured, substitutability
from understudy.organize.pooled import Array


def switching(run: xr.Dataset) -> pd.DataFrame:
    """Return how the best substitute of each (layer, source) changes over inputs, one row each.

    | column | |
    |---|---|
    | `inputs` | inputs on which the source is valid |
    | `modal` | the share of them that have the most frequent best substitute |
    | `switching` | 1 − `modal` |
    | `distinct` | how many different best substitutes there are |

    Sources that are valid nowhere are left out. `.median()`, `.quantile()` give the paper's figures.
    """
    substitutability(run)
    (run,) = measured(run)
    best = best_substitute(run["substitutability"].transpose("input", "layer", "source", "substitute").values)
    rows = []
    for at, layer in enumerate(run["layer"].values):
        for source in range(best.shape[2]):
            chosen = best[:, at, source]
            chosen = chosen[chosen >= 0]
            if len(chosen):
                counts = np.bincount(chosen)
                modal = counts.max() / len(chosen)
                rows.append((int(layer), source, len(chosen), modal, 1 - modal, int((counts > 0).sum())))
    names = ["layer", "source", "inputs", "modal", "switching", "distinct"]
    return pd.DataFrame(rows, columns=names).set_index(["layer", "source"])


def agreement(run: xr.Dataset, other: xr.Dataset) -> xr.Dataset:
    """Return how far two runs agree on each input and layer, paired in their order.

    `best`: the share of sources, valid in both, with the same best substitute. `spearman`, `pearson`: the correlation
    of S over the off-diagonal pairs that both have. The inputs may differ: perturbed, or other ones altogether.
    """
    a, b = (
        substitutability(each).transpose("input", "layer", "source", "substitute").values.astype(np.float64)
        for each in (run, other)
    )
    if a.shape != b.shape:
        raise UnderstudyError(f"Two runs agree or not pair by pair, but their S is {a.shape} and {b.shape}.")
    best = [best_substitute(each) for each in (a, b)]
    both = (best[0] >= 0) & (best[1] >= 0)
    with np.errstate(invalid="ignore"):
        same = ((best[0] == best[1]) & both).sum(-1) / both.sum(-1)
    flat = [each.reshape(*each.shape[:2], -1) for each in (a, b)]
    dims = ("input", "layer")
    found = {"best": (dims, same), "spearman": (dims, within_source(*flat)), "pearson": (dims, pearson(*flat))}
    return xr.Dataset(found, {"input": run["input"].values, "layer": run["layer"].values})


def best_substitute(S: Array) -> np.ndarray:
    """The best substitute of each source, −1 where the source is invalid: `[..., source]`."""
    known = np.isfinite(S)
    return np.where(known.any(-1), np.where(known, S, -np.inf).argmax(-1), -1)


def pearson(a: Array, b: Array) -> Array:
    """The correlation of the last axes where both are numbers."""
    known = np.isfinite(a) & np.isfinite(b)
    count = known.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        centred = [
            np.where(known, each - np.where(known, each, 0).sum(-1, keepdims=True) / count, 0) for each in (a, b)
        ]
        x, y = centred
        found: Array = (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return found
