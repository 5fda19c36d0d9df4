"""plan: what a measurement will take, said before it is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from understudy import head
from understudy import outcome as outcomes
from understudy.anatomy import Anatomy, anatomy
from understudy.capture import peek
from understudy.costs import NOISE_ROWS, Rates, Shape, cost
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs, as_inputs
from understudy.resume import BUDGET, Suffix, kl_and_bend
from understudy.search import Pairs, Search, as_search
from understudy.surgery import opened
from understudy.worker import Job, Layers, Worker, resolve_layers

# Inputs differ in length; so many, evenly spread, stand for all.
_SAMPLE = 64

# Pairs are searched for at most so many seconds, of sources whose removal matters.
_SEARCHED, _MEANINGFUL = 5.0, 1e-5

# A row is timed for about so long, among at most so many, of so many inputs.
_SECONDS, _MOST_ROWS, _TIMED = 0.5, 4096, 16


@dataclass(frozen=True)
class Plan:
    """What a measurement will take."""

    inputs: int
    layers: tuple[int, ...]
    units: int
    search: str
    evaluations: float  # downstream evaluations
    flops: float
    seconds: float
    weights: int  # bytes of the model
    budget: int  # bytes above them, at most
    disk: int  # bytes of the result, before compression


def plan(
    model: nn.Module,
    inputs: Inputs | Mapping[str, Tensor],
    *,
    layers: Layers = "last",
    units: str = "heads",
    search: str | Search = "refine",
    outcome: str = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    budget: int = BUDGET,
    workers: int = 1,
    rate: float | None = None,
) -> Plan:
    """Predict the cost of `measure` with the same arguments.

    >>> import understudy as us
    >>> us.plan(us.load("digits"), us.digits(8), search="grid:31", rate=1e11).evaluations
    7264.0

    rate: floating-point operations a second that the machine will reach; then no weights are needed. By default a few
    rows of the model are timed here, and a few pairs searched, for some seconds. workers: replicas that share the
    inputs.
    """
    body, chosen, way = anatomy(model).cut(units), as_inputs(inputs), as_search(search)
    numbers, kind = resolve_layers(body, layers), outcomes.resolve(body, outcome)
    if workers < 1:
        raise UnderstudyError(f"workers must be at least 1, but {workers} was given.")
    if rate is not None and not rate > 0:
        raise UnderstudyError(f"rate must be above 0 operations a second, but {rate} was given.")
    sample = list(range(0, len(chosen), max(1, len(chosen) // _SAMPLE)))
    with opened(model):
        shapes = [_shape(body, kind, chosen.batch([index])) for index in sample]
    costs = [cost(shape, inputs=1, layers=numbers, search=way) for shape in shapes]
    evaluations = sum(each.evaluations for each in costs)
    if rate is not None:
        seconds = sum(Rates.given(rate).seconds(each.work) for each in costs)
    else:
        job = Job(
            open=lambda: (model, chosen.take(sample[:_TIMED])),
            layers=layers,
            units=units,
            search=way,
            outcome=outcome,
            threshold=1e-5,
            device=device,
            dtype=dtype,
            batch_size=None,
            budget=budget,
            shard=None,
        )
        count, seconds, looks = _timed(job, shapes)
        pairs = shapes[0].units * (shapes[0].units - 1)
        evaluations += len(costs) * len(numbers) * pairs * (looks - way.expected(shapes[0].units))
        # Of the other inputs the law says how much longer or shorter they take.
        seconds *= sum(each.work.flops for each in costs) / sum(each.work.flops for each in costs[:count])
    times = len(chosen) / len(sample)
    return Plan(
        inputs=len(chosen),
        layers=numbers,
        units=shapes[0].units,
        search=way.name,
        evaluations=evaluations * times,
        flops=sum(each.work.flops for each in costs) * times,
        seconds=seconds * times / workers,
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        budget=budget,
        disk=costs[0].stored * len(chosen),
    )


def _timed(job: Job, shapes: Sequence[Shape]) -> tuple[int, float, float]:
    """How many inputs are captured together, their seconds, and how often the search looks at a pair.

    At some layers a row and a slope are timed, and some pairs are searched: how often depends on the model.
    """
    if any(p.device.type == "meta" for p in job.open()[0].parameters()):
        raise UnderstudyError("A model without weights here cannot be timed: give a rate (--rate).")
    with Worker(job) as worker:
        layers, search = worker.protocol.layers, worker.protocol.search
        at = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        captured = next(worker.captures(range(len(worker.inputs))))
        count, units = len(captured.names), shapes[0].units
        seconds = _each(lambda _: next(worker.captures(range(len(worker.inputs)))), 1)

        def work(layer: int) -> float:
            return sum(shape.row(layer).flops for shape in shapes[:count])

        found, looks = [], []
        for suffix in worker.suffixes(captured):
            if suffix.layer.index in at:
                row = _each(partial(_rows, suffix), 4)
                source = _each(partial(_slopes, suffix), 2) if search.sloped else row
                looks.append(_looks(suffix, search, row))
                rows = NOISE_ROWS + units * (units - 1) * looks[-1]
                found.append(count * (rows * row + units * source) / work(suffix.layer.index))
    # Between the layers that were timed, by the law.
    seconds += sum(float(np.interp(layer, at, found)) * work(layer) for layer in layers)
    return count, seconds, statistics.mean(looks)


def _looks(suffix: Suffix, search: Search, row: float) -> float:
    """How many evaluations a pair takes, from some sources of the first input where that is quick."""
    units = suffix.layer.units
    sources = min(units, int(_SEARCHED / (row * (units - 1) * max(1.0, search.expected(units)))))
    if not search.sloped or sources < 1 or search.expected(units) == 0:
        return search.expected(units)
    owners = torch.zeros(units, dtype=torch.int64)
    reduced, slopes = (v.cpu() for v in suffix.slopes(1 - torch.eye(units), owners, reduce=kl_and_bend))
    drop, bend = reduced.unbind(-1)
    wanted = ~torch.eye(units, dtype=torch.bool) & (drop > _MEANINGFUL)[:, None]
    source, substitute = wanted.nonzero(as_tuple=True)
    few = torch.isin(source, source.unique()[:sources])  # type: ignore[no-untyped-call]
    source, substitute = source[few], substitute[few]
    if not len(source):
        return search.expected(units)
    pairs = Pairs(
        torch.zeros_like(source), source, substitute, drop[source], units, slopes[source, substitute], bend[substitute]
    )
    before = int(suffix.evaluations.sum())
    search.best(pairs, lambda gates, owner: suffix.resume(gates, owner).cpu())
    return (int(suffix.evaluations.sum()) - before) / len(pairs)


def _rows(suffix: Suffix, rows: int) -> None:
    suffix.resume(torch.rand(rows, suffix.layer.units), _owners(suffix, rows))


def _slopes(suffix: Suffix, rows: int) -> None:
    suffix.slopes(torch.rand(rows, suffix.layer.units), _owners(suffix, rows), reduce=kl_and_bend)


def _owners(suffix: Suffix, rows: int) -> Tensor:
    return torch.arange(rows) * suffix.taken.count // rows


def _each(call: Callable[[int], object], rows: int) -> float:
    """The time of one row, of as many as take long enough to be timed."""
    while True:
        call(rows)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            call(rows)
            times.append(time.perf_counter() - began)
        if min(times) > _SECONDS / 4 or rows >= _MOST_ROWS or rows == 1:
            return statistics.median(times) / rows
        rows *= 4


def _shape(body: Anatomy, outcome: outcomes.Outcome, batch: Batch) -> Shape:
    bare = all(p.device.type == "meta" for p in body.model.parameters())  # shapes without weights
    tokens = batch["input_ids"].shape[1] if "input_ids" in batch else peek(body, batch, "meta" if bare else None)[1]
    if outcome != "classes":
        distributions = read = max(1, int(outcomes.positions(body, batch, outcome).sum()))
    else:
        # Without weights the head cannot be asked what it reads: mostly one token.
        distributions, read = 1, 1 if bare else _class_tokens(body, tokens)
    return Shape.of(body, tokens=tokens, distributions=distributions, read=read, classes=_classes(body))


def _class_tokens(body: Anatomy, tokens: int) -> int:
    width = Shape.of(body, tokens=1, distributions=1, read=1, classes=1).width
    hidden = torch.zeros(1, tokens, width, device=body.device, dtype=body.dtype)
    return max(1, int(head.tokens_read(body, hidden).sum()))


def _classes(body: Anatomy) -> int:
    output = getattr(body.model, "get_output_embeddings", lambda: None)()
    if output is not None:
        return int(output.weight.shape[0])
    config = getattr(body.model, "config", None)
    return int(getattr(config, "num_labels", 0) or getattr(body.model, "num_classes", 0) or 1)
