"""A trajectory from checkpoints that a training has saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xarray as xr
from torch import nn

from understudy.engines import Engine
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.measurement import measure
from understudy.metric import task_metric
from understudy.models import load
from understudy.scaling.family import Bar
from understudy.search import Search
from understudy.worker import Layers

# What a config says that does not change the architecture.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def checkpoints(folder: str | Path) -> dict[int, Path]:
    """The checkpoints below a folder by their step: `checkpoint-500`, `step500` or anything that ends in a number.

    Those of different architectures are refused.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UnderstudyError(f"{root} is not a folder: give one that holds checkpoints, such as a Trainer's output.")
    found: dict[int, Path] = {}
    for config in sorted(root.glob("*/config.json")):
        number = re.search(r"(\d+)$", config.parent.name)
        if number is None:
            continue
        if int(number[1]) in found:
            raise UnderstudyError(f"{found[int(number[1])]} and {config.parent} are both of step {int(number[1])}.")
        found[int(number[1])] = config.parent
    if len(found) < 2:
        raise UnderstudyError(
            f"{root} holds {len(found)} checkpoints: a trajectory needs two or more folders that end in their step "
            "(checkpoint-500) and hold a config.json."
        )
    ordered = dict(sorted(found.items()))
    first = next(iter(ordered.values()))
    for path in ordered.values():
        differ = [key for key, a, b in _pairs(_config(first), _config(path)) if a != b]
        if differ:
            raise UnderstudyError(
                f"{path.name} has another architecture than {first.name} ({', '.join(differ[:4])}): a trajectory is of "
                "one model."
            )
    return ordered


def measure_checkpoints(
    folder: str | Path,
    inputs: Inputs | Callable[[nn.Module], Inputs],
    *,
    layers: Layers = "quarters",
    search: str | Search = "refine",
    scored: Inputs | Callable[[nn.Module], Inputs] | None = None,
    out: str | Path | None = None,
    engine: str | Engine = "local",
    bar: Bar | None = None,
) -> list[xr.Dataset]:
    """Measure every checkpoint below a folder on the same inputs; `trajectory` takes the result.

    >>> runs = measure_checkpoints("output/", inputs, out="runs/")  # doctest: +SKIP

    inputs: the probe set, or a function that makes it for a model. scored: the same for the task metric.
    out: a folder for the runs; the same call again goes on where it was interrupted.
    """
    found = checkpoints(folder)
    runs = []
    for step, path in found.items():
        model: nn.Module = load(path)
        given = inputs(model) if callable(inputs) else inputs
        run = measure(
            model,
            given,
            layers=layers,
            search=search,
            out=None if out is None else Path(out) / f"{path.name}.zarr",
            engine=engine,
            progress=None if bar is None else bar(f"measuring {path.name}"),
        )
        run = run.load().assign_attrs(step=step)
        if (epoch := _epoch(path)) is not None:
            run.attrs["epoch"] = epoch
        if scored is not None:
            metric = task_metric(model, scored(model) if callable(scored) else scored)
            run.attrs |= {"metric": metric.value, "metric_name": metric.name}
        runs.append(run)
    return runs


def _config(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as problem:
        raise UnderstudyError(f"{path / 'config.json'} cannot be read: {problem}") from problem
    return {key: value for key, value in found.items() if key not in _INCIDENTAL}


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, a.get(key), b.get(key)) for key in sorted({*a, *b})]


def _epoch(path: Path) -> float | None:
    try:
        return float(json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
