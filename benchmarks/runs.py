"""Long runs: what storing costs, what memory they take, what Ray adds, and how near the plan comes.

    python -m benchmarks.runs [--part storing|memory|ray|plan]

Writes benchmarks/results/runs.json and runs.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.cases import gpt2, llama, vit
from benchmarks.memory import status
from benchmarks.timing import machine

import understudy as us
from understudy.run import Run

RESULTS = Path("benchmarks/results")


def storing() -> list[dict[str, Any]]:
    """The share of a run's time that goes into its store: begin, every shard, and the end."""
    settings = (
        ("digits", us.digits(599), {"layers": "last", "search": "estimate"}),
        ("digits", us.digits(599), {"layers": "all"}),
        ("stdlib", us.stdlib(32, length=64), {"layers": "quarters"}),
    )
    rows = []
    for name, inputs, options in settings:
        model = us.load(name)
        with tempfile.TemporaryDirectory() as folder:
            us.measure(model, inputs.take([0]), **options, out=Path(folder) / "run.zarr")  # warmed up
        with tempfile.TemporaryDirectory() as folder, _timed(Run, "__enter__", "write", "finish") as spent:
            began = time.perf_counter()
            us.measure(model, inputs, **options, out=Path(folder) / "run.zarr")
            seconds = time.perf_counter() - began
        size = {"model": name, "inputs": len(inputs), "search": "refine", **options}
        rows.append({**size, "seconds": seconds, "storing": sum(spent)})
    return rows


@contextmanager
def _timed(owner: type, *names: str) -> Iterator[list[float]]:
    """The seconds that calls of these methods take."""
    spent: list[float] = []
    before = {name: getattr(owner, name) for name in names}

    def timing(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        return timed

    try:
        for name, call in before.items():
            setattr(owner, name, timing(call))
        yield spent
    finally:
        for name, call in before.items():
            setattr(owner, name, call)


def memory() -> list[dict[str, Any]]:
    """The most memory that a process held, for few and for many inputs."""
    command = [sys.executable, "-m", "benchmarks.runs", "--child", "memory", "--inputs"]
    return [
        {"inputs": count, "peak": int(subprocess.check_output([*command, str(count)], text=True))}
        for count in (100, 1_000, 10_000)
    ]


def _memory_child(count: int) -> None:
    digits = us.digits(500)

    def load(indices: Any) -> dict[str, torch.Tensor]:
        """A held-out digit with noise of its own."""
        pixels = digits.batch([index % 500 for index in indices])["pixel_values"]
        for row, index in enumerate(indices):
            pixels[row] += 0.1 * torch.randn(pixels[row].shape, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": pixels}

    inputs = us.Inputs(tuple(f"digit-{index}" for index in range(count)), load)
    with tempfile.TemporaryDirectory() as folder:
        us.measure(us.load("digits"), inputs, search="estimate", out=Path(folder) / "run.zarr")
    print(status("VmHWM"))


def ray_overhead(minutes: float) -> list[dict[str, Any]]:
    """Two Ray workers against two plain processes on half of the inputs each, from start to end."""
    command = [sys.executable, "-m", "benchmarks.runs", "--child"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    count, points = min(599, max(8, int(599 * minutes / 5))), 91  # as many as take so long
    size = ["--inputs", str(count), "--points", str(points)]
    rows = []
    for kind, commands in (
        ("two plain processes", [[*command, "half", *size, "--half", str(half)] for half in (0, 1)]),
        ("two Ray workers", [[*command, "ray", *size]]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            running = [
                subprocess.Popen([*each, "--out", f"{folder}/{index}.zarr"], env=environment)
                for index, each in enumerate(commands)
            ]
            assert all(process.wait() == 0 for process in running)
            seconds = time.perf_counter() - began
            evaluations = sum(us.open_run(path).attrs["evaluations"] for path in Path(folder).glob("*.zarr"))
        rows.append({"how": kind, "inputs": count, "evaluations": evaluations, "seconds": seconds})
    return rows


def _ray_child(options: argparse.Namespace) -> None:
    inputs = us.digits(options.inputs)
    engine: Any = "local"
    if options.child == "ray":
        from understudy.engines.ray import Ray

        engine = Ray(workers=2)
    else:
        middle = options.inputs // 2
        inputs = inputs.take(range(middle) if options.half == 0 else range(middle, options.inputs))
    us.measure(us.load("digits"), inputs, layers="all", search=f"grid:{options.points}", out=options.out, engine=engine)


def plan() -> list[dict[str, Any]]:
    """Seconds as planned and as measured, for runs of different shape."""
    cases = {"ViT-B-sized": vit(inputs=8), "GPT-2-small-sized": gpt2(), "SmolLM-135M-sized": llama()}
    settings: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("digits", us.load("digits"), us.digits(128), {"layers": "all"}),
        ("digits-12", us.load("digits-12"), us.digits(16), {"layers": "last", "search": "grid:31"}),
        ("stdlib", us.load("stdlib"), us.stdlib(6, length=64), {"layers": "quarters", "search": "grid:16"}),
        ("stdlib", us.load("stdlib"), us.stdlib(16, length=64), {"layers": "all"}),
        ("stdlib", us.load("stdlib"), us.stdlib(16, length=128), {"layers": "all", "search": "estimate"}),
    ]
    for (name, case), search in zip(cases.items(), ("grid:31", "estimate", "estimate"), strict=True):
        settings.append((name, case.model, case.batch, {"layers": case.layer, "search": search}))
    rows = []
    for name, model, inputs, options in settings:
        said = us.plan(model, inputs, **options)
        began = time.perf_counter()
        run = us.measure(model, inputs, **options)
        seconds = time.perf_counter() - began
        rows.append(
            {"model": name, "inputs": said.inputs, "search": said.search, "layers": len(said.layers)}
            | {"planned": said.seconds, "measured": seconds, "error": said.seconds / seconds - 1}
            | {
                "evaluations": run.attrs["evaluations"],
                "evaluations_error": said.evaluations / run.attrs["evaluations"] - 1,
            }
        )
    return rows


def markdown(found: dict[str, Any]) -> str:
    """The tables that there are."""
    text = ["# Long runs"]
    if "storing" in found:
        text += [
            "## What storing costs",
            "| model | inputs | layers | search | seconds | storing |",
            "|---|---|---|---|---|---|",
        ]
        for row in found["storing"]["rows"]:
            text.append(
                f"| {row['model']} | {row['inputs']} | {row['layers']} | {row['search']} | {row['seconds']:.1f} | "
                f"{row['storing']:.2f}, {row['storing'] / row['seconds']:.1%} |"
            )
    if "memory" in found:
        text += ["", "## Memory against the number of inputs", "| inputs | peak of the process |", "|---|---|"]
        text += [f"| {row['inputs']:,} | {row['peak'] / 2**20:.0f} MiB |" for row in found["memory"]["rows"]]
    if "ray" in found:
        text += ["", "## Two Ray workers on two cores", "| how | evaluations | seconds |", "|---|---|---|"]
        rows = found["ray"]["rows"]
        text += [f"| {row['how']} | {row['evaluations']:,} | {row['seconds']:.0f} |" for row in rows]
        text += ["", f"Ray's overhead: {rows[1]['seconds'] / rows[0]['seconds'] - 1:+.1%}."]
    if "plan" in found:
        text += ["", "## The plan against the measurement"]
        text += [
            "| model | inputs | layers | search | planned, s | measured, s | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in found["plan"]["rows"]:
            text.append(
                f"| {row['model']} | {row['inputs']} | {row['layers']} | {row['search']} | {row['planned']:.2f} | "
                f"{row['measured']:.2f} | {row['error']:+.0%} |"
            )
    return "\n".join(text) + "\n"


def main() -> None:
    """Run the parts that were asked for, each written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("storing", "memory", "ray", "plan"), action="append")
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long the runs of the Ray part take")
    parser.add_argument("--child", choices=("memory", "ray", "half"), help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--points", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--half", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("understudy").setLevel(logging.ERROR)
    if options.child == "memory":
        _memory_child(options.inputs)
        return
    if options.child is not None:
        _ray_child(options)
        return
    parts = {"storing": storing, "memory": memory, "ray": lambda: ray_overhead(options.minutes), "plan": plan}
    store = RESULTS / "runs.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    for name in options.part or parts:
        print(time.strftime("%H:%M:%S"), name, file=sys.stderr, flush=True)
        found[name] = {"machine": machine(), "rows": parts[name]()}
        store.write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "runs.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
