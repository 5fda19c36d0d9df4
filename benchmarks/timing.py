"""How things are timed, and on what."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call that was made before."""
    return median_seconds_in_turn({0: call}, repeats)[0]


def median_seconds_in_turn(calls: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, float]:
    """The median time of each call, all of them made in turn."""
    times: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(some) for name, some in times.items()}


def best_rows(call: Callable[[int], object], sizes: Sequence[int], *, extra: int = 0, repeats: int = 2) -> int:
    """Which number of rows at once takes the least time for each row; `call(size)` runs that many, and `extra`.

    Sizes are tried in rising order, until two in a row gain less than 3% over the best.
    """
    best, least, idle = sizes[0], float("inf"), 0
    for size in sizes:
        call(size)
        each = median_seconds(lambda size=size: call(size), repeats) / (size + extra)
        idle = 0 if each < 0.97 * least else idle + 1
        if each < least:
            best, least = size, each
        if idle == 2:
            break
    return best


def version(package: str) -> str:
    """The installed version of a package."""
    return metadata.version(package)


def machine(packages: Sequence[str] = ()) -> dict[str, object]:
    """What was timed on: processor, cores, threads, and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", *packages)},
    }


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
