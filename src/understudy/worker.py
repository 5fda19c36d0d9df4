"""A worker: one model and its inputs, opened for a protocol, that measures shards of inputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from understudy import identity
from understudy import outcome as outcomes
from understudy.anatomy import Anatomy, anatomy
from understudy.batches import batches
from understudy.capture import Capture, capture, peek
from understudy.costs import Rates, Shape, cost
from understudy.errors import UnderstudyError
from understudy.identity import Protocol
from understudy.inputs.batch import Inputs, as_inputs
from understudy.matrices import Faults, matrices, reasons
from understudy.memory import free_cached, is_out_of_memory
from understudy.meter import Meter
from understudy.precision import Precision
from understudy.resume import Suffix
from understudy.search import Search, as_search
from understudy.store import MEASURED, VARIABLES
from understudy.surgery import opened

log = logging.getLogger(__name__)

Layers = str | int | Sequence[int]  # "last", "all", "quarters", or numbers

# A shard is what is lost when a run is killed: about this many seconds at nominal rates, so that the same run is cut
# the same way on every machine of a kind.
_SHARD_SECONDS = 10
_NOMINAL = {"cpu": Rates(1e11, 1e9)}
_ACCELERATOR = Rates(1e13, 1e11)
_MOST_INPUTS, _MOST_SHARDS, _SHARD_BYTES = 1024, 4096, 2**24

# Below this budget smaller pieces do not help any more.
_LEAST_BUDGET = 2**20


@dataclass(frozen=True)
class Job:
    """What a run was asked for: what a worker needs to open its model and inputs, here or in another process."""

    open: Callable[[], tuple[nn.Module, Inputs | Mapping[str, Tensor]]]
    layers: Layers
    units: str
    search: str | Search
    outcome: str
    threshold: float
    device: str | torch.device | None
    dtype: str | torch.dtype | None
    batch_size: int | None
    budget: int
    shard: int | None

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("shard", self.shard)):
            if value is not None and value < 1:
                raise UnderstudyError(f"{name} must be at least 1, but {value} was given.")
        if self.budget < 1:
            raise UnderstudyError(f"budget must be a number of bytes above 0, but {self.budget} was given.")
        if not self.threshold > 0:
            raise UnderstudyError(f"threshold must be above 0, but {self.threshold} was given.")


@dataclass(frozen=True)
class About:
    """What a run is, before anything is measured: its attributes, coordinates, and how many inputs a shard has."""

    attributes: Mapping[str, Any]
    coords: Mapping[str, Any]
    shard: int


@dataclass(frozen=True)
class Shard:
    """The variables of neighbouring inputs, and the memory budget that was enough for them."""

    span: range
    values: Mapping[str, np.ndarray]
    budget: int


@dataclass(frozen=True)
class Captured:
    """Inputs on the dense forward: their names, what was kept, and the tokens that the outcome reads."""

    names: tuple[str, ...]
    taken: Capture
    reads: outcomes.Reads


class Worker:
    """A model and its inputs, opened for a job. `with Worker(job) as worker:` leaves the model as it was."""

    def __init__(self, job: Job) -> None:
        model, inputs = job.open()
        self.body, self.inputs, self._job = anatomy(model).cut(job.units), as_inputs(inputs), job
        self.protocol = Protocol(
            layers=resolve_layers(self.body, job.layers),
            units=job.units,
            search=as_search(job.search),
            outcome=outcomes.resolve(self.body, job.outcome),
            threshold=float(job.threshold),
        )
        self._budget, self._batch_size = job.budget, job.batch_size
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(placed(self.body, self._job.device))
            stack.enter_context(opened(self.body.model))
            self._precision = Precision(self.body, self._job.dtype, min(self.protocol.layers))
            _, self._tokens, self._width = peek(self.body, self.inputs.batch([0]))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """The precision of everything after a site."""
        return self._precision.dtype

    def about(self) -> About:
        """What the run will be."""
        units = {self.body.sites[layer].units for layer in self.protocol.layers}
        if len(units) > 1:
            raise UnderstudyError(
                f"The layers have different numbers of heads ({sorted(units)}): measure those with the same number."
            )
        number = np.arange(units.pop())
        coords = {
            "input": np.array(self.inputs.ids, dtype=object),
            "layer": np.array(self.protocol.layers),
            "source": number,
            "substitute": number,
        }
        attributes = identity.attributes(self.body, self.inputs, self.protocol, self.dtype)
        return About(attributes, coords, self._job.shard or self._shard_size(len(number)))

    def measure(self, span: range, meter: Meter, budget: int | None = None) -> Shard:
        """Measure the inputs of a span. Where memory runs out, smaller pieces are tried, and their size is kept."""
        self._budget = min(self._budget, budget or self._budget)
        meter.mark()
        while True:
            try:
                return self._measure(span, meter)
            except (RuntimeError, MemoryError) as problem:
                if not is_out_of_memory(problem) or self._budget < 2 * _LEAST_BUDGET:
                    raise
            # Outside the handler: what the failed attempt held is free only now.
            self._budget //= 2
            self._batch_size = None if self._batch_size is None else max(1, self._batch_size // 2)
            free_cached()
            meter.again()
            log.warning("Memory ran out: going on with a budget of %.0f MiB.", self._budget / 2**20)

    def captures(self, span: range) -> Iterator[Captured]:
        """The inputs of a span on the dense forward, as many at a time as fit."""
        for indices, batch in batches(
            self.inputs,
            span,
            most=self._batch_size,
            bytes_each=self._bytes_each,
            budget=self._budget,
            tokens=None if self.body.reads_text else self._tokens,
        ):
            names = tuple(self.inputs.ids[index] for index in indices)
            taken = capture(self.body, batch, self.protocol.layers)
            yield Captured(names, taken, outcomes.reads(self.body, taken, self.protocol.outcome, names))

    def suffixes(self, captured: Captured) -> Iterator[Suffix]:
        """What was captured, opened at the site of one layer after the other."""
        with self._precision.applied():
            for layer in self.protocol.layers:
                yield Suffix(
                    self.body,
                    captured.taken,
                    layer,
                    captured.reads,
                    dtype=self.dtype,
                    budget=self._budget,
                )

    def _measure(self, span: range, meter: Meter) -> Shard:
        parts = []
        began = time.perf_counter()
        for captured in self.captures(span):
            faults = Faults(captured.taken.count)
            layers = []
            for suffix in self.suffixes(captured):
                found = matrices(suffix, self.protocol, faults, meter)
                layers.append({**found, "evaluations": suffix.evaluations})
            now = time.perf_counter()
            parts.append(_together(layers, reasons(faults, captured.names), captured.names, now - began))
            began = now
        values = {name: np.concatenate([part[name] for part in parts]) for name in VARIABLES}
        return Shard(span, values, self._budget)

    def _bytes_each(self, tokens: int) -> int:
        """What the capture of one input keeps, and what a block needs meanwhile."""
        kept = self._width
        for index in self.protocol.layers:
            layer = self.body.sites[index]
            kept += layer.units * layer.width + (2 + (layer.beside is not None)) * self._width
        widest = max(max(p.shape, default=1) for p in self.body.layers[-1].block.parameters())
        return 4 * tokens * max(kept, 8 * self._width + 4 * widest)

    def _shard_size(self, units: int) -> int:
        read = 1 if self.protocol.outcome in ("classes", "last") else self._tokens
        shape = Shape.of(self.body, tokens=self._tokens, distributions=read, read=read, classes=1)
        each = cost(shape, inputs=1, layers=self.protocol.layers, search=self.protocol.search).work
        rates = _NOMINAL.get(self.body.device.type, _ACCELERATOR)
        size = min(
            int(_SHARD_SECONDS / rates.seconds(each)),
            _SHARD_BYTES // (4 * len(self.protocol.layers) * units**2),
            _MOST_INPUTS,
        )
        return max(1, -(-len(self.inputs) // _MOST_SHARDS), min(size, len(self.inputs)))


def _together(
    layers: Sequence[Mapping[str, Tensor]], problems: Mapping[str, str], names: Sequence[str], seconds: float
) -> dict[str, np.ndarray]:
    """The variables of a batch from those of its layers, one mapping each."""
    values: dict[str, np.ndarray] = {}
    for name in layers[0]:
        values[name] = torch.stack([found[name] for found in layers], 1).numpy().astype(VARIABLES[name].dtype)
    bad = np.array([name in problems for name in names])
    for value in values.values():
        if value.dtype.kind == "f":
            value[bad] = np.nan
    values["status"] = np.array([problems.get(name, MEASURED) for name in names], dtype=object)
    values["seconds"] = np.full(len(names), seconds / len(names), dtype=np.float32)
    return values


def resolve_layers(body: Anatomy, layers: Layers) -> tuple[int, ...]:
    """Layer indices in rising order, from what the user wrote."""
    count = len(body.layers)
    if isinstance(layers, str):
        named = {
            "last": [count - 1],
            "all": list(range(count)),
            "quarters": sorted({count // 4, count // 2, 3 * count // 4}),
        }
        if layers not in named:
            raise UnderstudyError(
                f"layers={layers!r} is not possible: say 'last', 'all', 'quarters', a layer or a list of layers."
            )
        return tuple(named[layers])
    chosen = [layers] if not isinstance(layers, Sequence) else [*layers]
    if not chosen:
        raise UnderstudyError("No layer was given: say 'last', 'all', 'quarters', a layer or a list of layers.")
    return tuple(sorted({body.layer_index(layer) for layer in chosen}))


@contextmanager
def placed(body: Anatomy, device: str | torch.device | None) -> Iterator[None]:
    """The model on a device, and back where it was afterwards."""
    try:
        wanted = body.device if device is None else torch.device(device)
    except RuntimeError as problem:
        raise UnderstudyError(
            f"device={device!r} is not one that torch knows: say 'cpu', 'cuda' or 'cuda:1'."
        ) from problem
    if wanted == body.device:
        yield
        return
    if getattr(body.model, "hf_device_map", None):
        raise UnderstudyError(
            f"device={str(device)!r} cannot be used with a model spread over devices by device_map: leave it out."
        )
    before = body.device
    try:
        try:
            body.model.to(wanted)
        except (RuntimeError, AssertionError) as problem:
            raise UnderstudyError(f"device={str(device)!r} cannot be used here: {problem}.") from problem
        yield
    finally:
        body.model.to(before)
