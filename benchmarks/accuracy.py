"""How exact the searches are on the bundled models, against grids and against each other.

python -m benchmarks.accuracy --model digits --model stdlib
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict, dataclass

import numpy as np
import torch
from benchmarks.suffix import suffix_of
from benchmarks.timing import median_seconds_in_turn
from scipy.stats import ConstantInputWarning, spearmanr

import understudy as us
from understudy.anatomy import anatomy
from understudy.resume import kl_and_bend

# Inputs of each model: few, because a 301-point grid runs for every pair of every layer.
MODELS = {"digits": 48, "digits-12": 12, "stdlib": 4}
LENGTH = 64  # tokens of a text
FINE = 301
GUESSES = ("estimate", "estimate:3", "estimate:4")


@dataclass(frozen=True)
class Accuracy:
    """One layer of one model; forwards are in units of H forwards of the suffix, by time."""

    model: str
    layer: int
    pairs: int
    evaluations: float  # of refine, for each pair
    as_good: float  # share of pairs with S of refine >= S of grid:31 - 1e-4
    fine: float  # mean |S - S of a 301-point grid|
    raw: float  # Raw Oracle of refine
    screen: float  # Raw Oracle of screen:3 minus that
    guesses: dict[str, Guess]


@dataclass(frozen=True)
class Guess:
    """What an estimate says, against refine."""

    forwards: float
    pearson: float
    spearman: float  # within a source
    named: float  # best substitute named right
    recovery: float  # S of the substitute named, over the best's


def accuracy(name: str, count: int) -> list[Accuracy]:
    """A row for each layer."""
    model = us.load(name)
    inputs = us.stdlib(count, length=LENGTH) if name == "stdlib" else us.digits(count)
    searches = ("refine", "grid:31", "screen:3", *GUESSES)
    table = []
    for layer in range(len(anatomy(model).layers)):
        runs = {search: us.measure(model, inputs, layers=layer, search=search) for search in searches}
        S = {search: run["substitutability"].values[:, 0] for search, run in runs.items()}
        there = np.isfinite(S["refine"])
        fine = us.measure(model, inputs, layers=layer, search=f"grid:{FINE}")["substitutability"].values[:, 0]
        heads = there.shape[-1]
        spent = runs["refine"].attrs["evaluations"] - count * (2 + heads)
        slope, row = _seconds(model, inputs.batch(range(count)), layer)
        valid = there.any(-1)
        raw, screened = (np.nanmax(S[search][valid], -1).mean() for search in ("refine", "screen:3"))
        guesses = {}
        for search in GUESSES:
            tries = (runs[search].attrs["evaluations"] - count * (2 + heads)) / count / heads
            guesses[search] = _guess(S["refine"], S[search], slope / row + tries)
        table.append(
            Accuracy(
                model=name,
                layer=layer,
                pairs=int(there.sum()),
                evaluations=spent / there.sum(),
                as_good=float((S["refine"] >= S["grid:31"] - 1e-4)[there].mean()),
                fine=float(np.abs(S["refine"] - fine)[there].mean()),
                raw=float(raw),
                screen=float(screened - raw),
                guesses=guesses,
            )
        )
    return table


def _guess(S: np.ndarray, E: np.ndarray, forwards: float) -> Guess:
    rows = np.isfinite(S).sum(-1) == S.shape[-1] - 1
    S, E = S[rows], E[rows]  # [sources, substitutes], NaN at the source itself
    known = np.isfinite(S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        ranks = [spearmanr(s[k], e[k]).statistic for s, e, k in zip(S, E, known, strict=True)]
    named = np.nanargmax(E, -1)
    return Guess(
        forwards=float(forwards),
        pearson=float(np.corrcoef(S[known], E[known])[0, 1]),
        spearman=float(np.nanmean(ranks)),
        named=float((named == np.nanargmax(S, -1)).mean()),
        recovery=float(np.take_along_axis(S, named[:, None], -1).mean() / np.nanmax(S, -1).mean()),
    )


def _seconds(model: torch.nn.Module, batch: dict[str, torch.Tensor], layer: int) -> tuple[float, float]:
    """The time of drops with their slopes, and of as many forwards of the suffix."""
    with suffix_of(model, batch, layer) as (suffix, _):
        count, units = suffix.taken.count, suffix.layer.units
        gates = (1 - torch.eye(units)).repeat(count, 1)
        owner = torch.arange(count).repeat_interleave(units)
        calls = {
            "slope": lambda: suffix.slopes(gates, owner, reduce=kl_and_bend),
            "row": lambda: suffix.resume(gates, owner),
        }
        for call in calls.values():
            call()
        timed = median_seconds_in_turn(calls, 5)
    return timed["slope"], timed["row"]


def main() -> None:
    """Print a row for each layer, as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--inputs", type=int, help="instead of the model's own number")
    options = parser.parse_args()
    for name in options.model or MODELS:
        for row in accuracy(name, options.inputs or MODELS[name]):
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
