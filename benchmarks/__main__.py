"""make bench: the accuracy of the searches, and seconds against the peers and the limit, as one Markdown file and JSON.

python -m benchmarks --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import accuracy, laws, memory, ours, tables, versus
from benchmarks.cases import CASES
from benchmarks.peers import PEERS
from benchmarks.timing import machine

from understudy.costs import Rates

MEMORY = (
    {"vocabulary": 150_000, "inputs": 4, "search": "estimate"},
    {"vocabulary": 150_000, "inputs": 16, "search": "estimate"},
    {"vocabulary": 150_000, "inputs": 2, "search": "refine"},
    {"vocabulary": 8_000, "inputs": 32, "search": "refine"},
)
PARTS = ("accuracy", "seconds", "memory", "laws")


def main() -> None:
    """Run the parts that were asked for, each written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="by default benchmarks/results; a miniature needs another place")
    parser.add_argument("--part", choices=PARTS, action="append", help="only these; the others are kept as they are")
    parser.add_argument("--tiny", action="store_true", help="miniatures, to see that everything runs")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.tiny and options.out is None:
        parser.error("--tiny needs --out: its figures say nothing, and would overwrite those that do")
    options.out = options.out or Path("benchmarks/results")
    logging.getLogger("understudy").setLevel(logging.ERROR)  # a threshold of 1e-300 is raised to the noise, as it says
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "bench.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    parts: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: _accuracy(tiny=options.tiny),
        "seconds": lambda: _seconds(tiny=options.tiny, repeats=options.repeats),
        "memory": lambda: _memory(tiny=options.tiny),
        "laws": _laws,
    }
    for part in options.part or PARTS:
        began = time.perf_counter()
        found[part] = {"machine": machine([peer.tool for peer in PEERS]), **parts[part]()}
        found[part]["minutes"] = (time.perf_counter() - began) / 60
        store.write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "bench.md").write_text(tables.markdown(found))
    print(tables.markdown(found))


def _accuracy(*, tiny: bool) -> dict[str, Any]:
    table = []
    for name, count in accuracy.MODELS.items():
        _say(f"accuracy: {name}")
        table += [asdict(row) for row in accuracy.accuracy(name, 2 if tiny else count)]
    return {"rows": table}


def _seconds(*, tiny: bool, repeats: int) -> dict[str, Any]:
    sample = versus.Sample(2, 99 if tiny else 2, 16, repeats)
    rows, limits = [], []
    for name, build in CASES.items():
        _say(f"seconds: {name}, understudy")
        inputs = 16 if name == "vit" else 1
        table, limit = ours.rows(build(tiny=tiny, inputs=inputs), inputs=inputs, repeats=repeats)
        _say(f"seconds: {name}, peers")
        rows += [asdict(row) for row in (*table, *versus.compare(build(tiny=tiny), sample))]
        limits.append(asdict(limit))
    return {"rows": rows, "limits": limits}


def _memory(*, tiny: bool) -> dict[str, Any]:
    rows = []
    for setting in MEMORY:
        _say(f"memory: {setting}")
        given: dict[str, Any] = {**setting, "tokens": 32 if tiny else 256}
        rows.append({**given, "peak_over_budget": memory.peak(**given)})
    return {"rows": rows}


def _laws() -> dict[str, Any]:
    _say("laws")
    rates, rows = laws.laws()
    return {"fitted": asdict(rates), "measured": asdict(Rates.measured()), "rows": [asdict(row) for row in rows]}


def _say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
