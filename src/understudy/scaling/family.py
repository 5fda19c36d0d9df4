"""A family: models that are measured under one protocol, so that their organization can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import xarray as xr
from torch import nn

from understudy.engines import Engine
from understudy.inputs.batch import Inputs
from understudy.measurement import measure
from understudy.meter import Progress
from understudy.metric import Metric, task_metric
from understudy.models import load
from understudy.recipes.kept import Trainable, kept, place
from understudy.scaling.divide import divided
from understudy.worker import Layers

Bar = Callable[[str], Progress | None]


@dataclass(frozen=True)
class SharedProtocol:
    """What every member of a family is asked alike.

    measured: the inputs of CFS. scored: those of the task metric, usually more.
    """

    measured: Callable[[nn.Module], Inputs]
    scored: Callable[[nn.Module], Inputs]
    layers: Layers
    search: str
    outcome: str = "auto"
    tau: float = 0.5


@dataclass(frozen=True)
class Member:
    """One model of a family: `open` loads it, and trains it first where that is needed. `name` is unique in a study."""

    name: str
    open: Callable[[Progress | None], nn.Module]
    seed: int = 0


def trained_member(recipe: Trainable, folder: Path, seed: int) -> Member:
    """The model of a recipe and a seed, trained in `folder` unless it is there."""
    return Member(place(recipe, seed), partial(_trained, recipe, folder, seed), seed)


def _trained(recipe: Trainable, folder: Path, seed: int, progress: Progress | None) -> nn.Module:
    return load(kept(recipe, folder, seed=seed, progress=progress))


@dataclass(frozen=True)
class Point:
    """A member as it was found: its size, how good it is, and its run."""

    name: str
    seed: int
    parameters: int
    metric: Metric
    run: xr.Dataset


def points(
    members: Sequence[Member],
    protocol: SharedProtocol,
    folder: Path,
    *,
    engine: str | Engine = "local",
    bar: Bar | None = None,
) -> list[Point]:
    """Open, measure and score every member; what is in `folder` already is not done again.

    Several processes may share the folder, and then divide the members among them.
    """
    show = bar or (lambda _step: None)
    work = {_place(member): partial(_point, member, protocol, folder, engine, show) for member in members}
    return list(divided(work, folder).values())


def _point(member: Member, protocol: SharedProtocol, folder: Path, engine: str | Engine, bar: Bar) -> Point:
    model = member.open(bar(f"training {member.name}"))
    place = folder / _place(member)
    here = engine == "local"
    run = measure(
        model if here else partial(member.open, None),  # workers elsewhere open their own
        protocol.measured(model) if here else protocol.measured,
        layers=protocol.layers,
        search=protocol.search,
        outcome=protocol.outcome,
        out=Path(f"{place}.zarr"),
        engine=engine,
        progress=bar(f"measuring {member.name}"),
    )
    scored = protocol.scored(model)
    of = {"model": run.attrs["model_hash"], "inputs": scored.fingerprint()}
    scores = Path(f"{place}.json")
    metric = _kept_metric(scores, of)
    if metric is None:
        metric = task_metric(model, scored, progress=bar(f"scoring {member.name}"))
        scores.write_text(json.dumps({**of, **asdict(metric)}) + "\n", encoding="utf-8")
    size = sum(parameter.numel() for parameter in model.parameters())
    return Point(member.name, member.seed, size, metric, run)


def _place(member: Member) -> str:
    return member.name.replace("/", "--")


def _kept_metric(path: Path, of: dict[str, str]) -> Metric | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        metric = Metric(found["name"], found["value"], found["count"])
    except (OSError, ValueError, KeyError):
        return None
    return metric if all(found.get(key) == value for key, value in of.items()) else None
