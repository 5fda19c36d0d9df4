"""The same CFS job by each peer: first whether the answers agree, then seconds for each intervention.

    python -m benchmarks.versus --case gpt2 --tiny

The job is a full matrix of one input: H drops, and for each of the H(H-1) pairs the 30 values of alpha that are not 1
(alpha = 1 is the drop). A sample of interventions is timed, warmed up and at the best number of rows at once, and
scaled to the matrix; what a peer does once (wrapping the model, one dense forward) is timed apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from benchmarks.cases import CASES, Case
from benchmarks.peers import PEERS, CannotRun, Peer, Way
from benchmarks.timing import best_rows, machine, median_seconds_in_turn, version
from torch import Tensor

import understudy as us
from understudy.search import Evaluate, Found, Grid, Pairs

POINTS = 31
AGREE = 1e-3  # the largest difference in S between two tools that compute the same


@dataclass(frozen=True)
class Row:
    """What was found of one tool's way through one case; None where it was not run."""

    case: str
    tool: str
    version: str
    way: str
    rows_at_once: int | None = None
    seconds_each: float | None = None
    seconds_matrix: float | None = None
    sampled: int = 0  # interventions timed in each repeat
    difference_S: float | None = None  # the largest, over the sampled pairs
    note: str = ""
    seconds_setup: float | None = None  # once for each input, in none of the others


@dataclass(frozen=True)
class Sample:
    """How much of a case is run: pairs for the answers, interventions for the time."""

    sources: int = 2
    substitutes: int = 2
    interventions: int = 32
    repeats: int = 3
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)

    def pairs(self, heads: int) -> list[tuple[int, int]]:
        """The sampled pairs, spread over the heads."""
        sources = _spaced(range(heads), self.sources)
        return [(i, j) for i in sources for j in _spaced([j for j in range(heads) if j != i], self.substitutes)]


def compare(case: Case, sample: Sample, peers: tuple[Peer, ...] = PEERS) -> list[Row]:
    """A row for each way of each peer.

    All ways are timed in turn, again and again, so that what else the machine does falls on all of them.
    """
    pairs = sample.pairs(case.heads)
    truth = _by_understudy(case, pairs)
    rows, ways = [], {}
    for peer in peers:
        for name in ("full", "resume"):
            row, way = _checked(case, sample, peer, name, pairs, truth)
            if way is not None:
                ways[len(rows)] = way
            rows.append(row)
    gates = {place: _timed_gates(case.heads, rows[place].sampled) for place in ways}
    calls = {place: partial(way, gates[place]) for place, way in ways.items()}
    for place, seconds in median_seconds_in_turn(calls, sample.repeats).items():
        extra = ways[place].extra_rows
        each = seconds / (rows[place].sampled + extra)
        rows[place] = replace(rows[place], seconds_each=each, seconds_matrix=each * (interventions(case.heads) + extra))
    return rows


def interventions(heads: int) -> int:
    """How many rows a full matrix takes."""
    return heads + heads * (heads - 1) * (POINTS - 1)


def _checked(
    case: Case, sample: Sample, peer: Peer, name: str, pairs: list[tuple[int, int]], truth: Tensor
) -> tuple[Row, Way | None]:
    """What there is to say before timing, and the way to be timed, at its best number of rows at once."""
    row = Row(case.name, peer.tool, version(peer.tool), name)
    kind = peer.way(name)
    if kind is None:
        return replace(row, note=f"none: {peer.no_resume}"), None
    began = time.perf_counter()
    try:
        way = kind(case)
    except CannotRun as reason:
        return replace(row, note=f"cannot run: {reason}"), None
    setup = time.perf_counter() - began
    gates = _timed_gates(case.heads, max(sample.sizes))
    way.rows_at_once = best_rows(lambda size: _at(way, size)(gates[:size]), sample.sizes, extra=way.extra_rows)
    difference = float((_by_peer(way, case.heads, pairs) - truth).abs().max())
    row = replace(row, rows_at_once=way.rows_at_once, difference_S=difference, seconds_setup=setup)
    if not difference <= AGREE:  # also where it is no number
        return replace(row, note=f"computes something else: S differs by up to {difference:.2g}"), None
    # Whole batches: a matrix is so long that its last, shorter one does not count.
    whole = max(1, sample.interventions // way.rows_at_once) * way.rows_at_once
    if not bool((truth > 10 * AGREE).any()):
        row = replace(row, note="the sampled pairs recover nothing, so that the answers agree says little")
    return replace(row, sampled=whole), way


def _at(way: Way, size: int) -> Way:
    way.rows_at_once = size
    return way


def _alphas() -> Tensor:
    grid = torch.linspace(0, 3, POINTS, dtype=torch.float64)
    return grid[(grid - 1).abs() > 1e-9].float()


def _gates(heads: int, source: int, substitute: int | None = None, alphas: Tensor | None = None) -> Tensor:
    """The drop of a source, or its pair with a substitute at some alphas."""
    gates = torch.ones(1 if alphas is None else len(alphas), heads)
    if substitute is not None:
        gates[:, substitute] = alphas
    gates[:, source] = 0
    return gates


def _timed_gates(heads: int, count: int) -> Tensor:
    """So many interventions, spread over all pairs and alphas."""
    pairs = [(i, j) for i in range(heads) for j in range(heads) if i != j]
    every = torch.cat([_gates(heads, i, j, _alphas()) for i, j in pairs])
    return every[torch.linspace(0, len(every) - 1, count).long()]


def _by_peer(way: Way, heads: int, pairs: list[tuple[int, int]]) -> Tensor:
    """S of the pairs, as its definition says."""
    sources = sorted({i for i, _ in pairs})
    found = way(torch.cat([_gates(heads, i) for i in sources] + [_gates(heads, i, j, _alphas()) for i, j in pairs]))
    found = found.double()
    drop = dict(zip(sources, found, strict=False))
    damage = found[len(sources) :].view(len(pairs), -1).amin(1)
    return torch.stack([1 - torch.minimum(d, drop[i]) / drop[i] for (i, _), d in zip(pairs, damage, strict=True)])


def _by_understudy(case: Case, pairs: list[tuple[int, int]]) -> Tensor:
    """S of the pairs by `understudy.measure` with `grid:31`, no source being below the threshold."""
    run = us.measure(
        case.model,
        case.input(0),
        layers=case.layer,
        search=_Sampled(POINTS, frozenset(pairs)),
        outcome=case.outcome,
        threshold=1e-300,
    )
    matrix = torch.from_numpy(run["substitutability"].values[0, 0])
    return torch.stack([matrix[i, j] for i, j in pairs]).double()


@dataclass(frozen=True)
class _Sampled(Grid):
    """`grid:N` on some pairs only; the others are NaN. A full matrix of a large case would take minutes."""

    chosen: frozenset[tuple[int, int]]

    def best(self, pairs: Pairs, evaluate: Evaluate) -> Found:
        wanted = [(int(i), int(j)) in self.chosen for i, j in zip(pairs.source, pairs.substitute, strict=True)]
        which = torch.tensor(wanted).nonzero().squeeze(1)
        found = super().best(pairs.only(which), evaluate)
        blank = torch.full((len(pairs),), torch.nan, dtype=torch.float64)
        parts = (found.substitutability, found.compensation, found.damage)
        return Found(*(blank.index_put((which,), part.double()) for part in parts))


def _spaced(values: range | list[int], count: int) -> list[int]:
    """`count` of the values at even distances, or all of them."""
    count = min(count, len(values))
    return [values[index * len(values) // count] for index in range(count)]


def main() -> None:
    """Print the machine and a row for each way, as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--peer", choices=[peer.tool for peer in PEERS], action="append", help="only these")
    parser.add_argument("--tiny", action="store_true", help="miniatures of the models, and all their pairs")
    parser.add_argument("--sources", type=int, default=2, help="how many are held against understudy's answers")
    parser.add_argument("--substitutes", type=int, default=2, help="the same, of each source")
    parser.add_argument("--interventions", type=int, default=32, help="how many are timed in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    logging.getLogger("understudy").setLevel(logging.ERROR)  # the raised threshold is what 1e-300 asks for
    peers = tuple(peer for peer in PEERS if not options.peer or peer.tool in options.peer)
    print(json.dumps(machine([peer.tool for peer in peers])))
    pairs = (99, 99) if options.tiny else (options.sources, options.substitutes)
    sample = Sample(*pairs, options.interventions, options.repeats)
    for name in CASES if options.case == "all" else [options.case]:
        for row in compare(CASES[name](tiny=options.tiny), sample, peers):
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
