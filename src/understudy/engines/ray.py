"""Shards over the actors of a Ray cluster, each with one replica of the model.

Ray places the actors, starts those again that die, and repeats what they were doing; nothing of that is ours.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import cuda

from understudy.engines import ShardsFailed
from understudy.errors import UnderstudyError, Unfinished
from understudy.meter import Meter
from understudy.worker import About, Job, Shard, Worker

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

# A shard is tried again this often after its actor died; a shard that kills every actor must not go on for ever.
RETRIES = 3
# So many shards in a row that fail, with none that succeeds, are no accident.
_HOPELESS = 3
# Seconds until one hears that no actor was placed, and between looks for those that were.
_PATIENCE, _GLANCE = 30.0, 5.0


@dataclass(frozen=True)
class Ray:
    """The engine that spreads shards over a local or an existing Ray cluster.

    >>> import understudy as us
    >>> from understudy.engines.ray import Ray
    >>> run = us.measure(model, inputs, out="run.zarr", engine=Ray(workers=8, gpus=0.5))  # doctest: +SKIP

    address: of a cluster that runs ("auto" for the one of this machine); without it, one is started here and stopped
    at the end. workers: how many replicas; by default as many as the cluster has room for. gpus, cpus: what Ray keeps
    for each replica; a fraction lets several share a device.
    """

    address: str | None = None
    workers: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UnderstudyError(f"workers must be at least 1, but {self.workers} was given.")
        if self.gpus < 0 or self.cpus < 0:
            raise UnderstudyError(f"gpus and cpus must not be negative, but {self.gpus} and {self.cpus} were given.")

    @contextmanager
    def open(self, job: Job) -> Iterator[_Actors]:
        """Actors for a job. A cluster that was started here is stopped, another one only loses our actors."""
        ray = _imported()
        started = not ray.is_initialized()
        if started:
            with _own_signals():
                try:
                    ray.init(
                        address=self.address or "local",
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="error",
                    )
                except (ConnectionError, RuntimeError, ValueError) as problem:
                    raise UnderstudyError(f"There is no Ray cluster at {self.address}: {problem}") from problem
        actors: list[Any] = []
        try:
            room = self._room(ray.nodes())
            if self.workers is not None and self.workers > room:
                log.warning("%d workers were asked for; the cluster has room for %d.", self.workers, room)
            options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": -1, "max_task_retries": RETRIES}
            kind, shared = ray.remote(_Replica).options(**options), ray.put(job)
            actors += [kind.remote(self.gpus) for _ in range(min(self.workers or room, room))]
            yield _Actors(ray, actors, shared)
        finally:
            for actor in actors:
                ray.kill(actor)
            if started:
                ray.shutdown()

    def _room(self, nodes: list[dict[str, Any]]) -> int:
        """How many replicas the cluster has room for: each is on one node."""
        there = [node["Resources"] for node in nodes if node["Alive"]]
        wanted = {"CPU": self.cpus, "GPU": self.gpus}

        def on(node: dict[str, float]) -> int:
            return min((int(node.get(kind, 0) / amount) for kind, amount in wanted.items() if amount), default=1)

        room = sum(map(on, there))
        if room < 1:
            most = {kind: max((node.get(kind, 0) for node in there), default=0) for kind in wanted}
            raise UnderstudyError(
                f"The cluster has no room for one replica with {self.cpus:g} CPUs and {self.gpus:g} GPUs: its largest "
                f"node has {most['CPU']:g} and {most['GPU']:g}."
            )
        return room


@dataclass(frozen=True)
class _Failure:
    span: range
    reason: str


class _Replica:
    """An actor. Its worker is opened when it is first asked: one that Ray started again has nothing else to go by."""

    def __init__(self, gpus: float) -> None:
        self._gpus = gpus
        self._opened: Worker | None = None

    def _worker(self, job: list[Any]) -> Worker:
        if self._opened is None:
            # In a list it is a reference, fetched once and not for every shard.
            given: Job = _imported().get(job[0])
            model, inputs = given.open()
            device = given.device
            if device is None and self._gpus and not getattr(model, "hf_device_map", None) and cuda.is_available():
                device = "cuda"  # what Ray keeps for this actor is all that it sees
            given = replace(given, open=lambda: (model, inputs), device=device)
            self._opened = Worker(given).__enter__()  # it lives as long as the actor
        return self._opened

    def ready(self) -> None:
        """Answer, once there is a place for the actor."""

    def about(self, job: list[Any]) -> About:
        return self._worker(job).about()

    def measure(self, job: list[Any], span: range, budget: int) -> Shard | _Failure:
        worker = self._worker(job)
        try:
            return worker.measure(span, Meter(None, 0), budget)
        except UnderstudyError as problem:
            return _Failure(span, str(problem))
        except Exception as problem:
            return _Failure(span, f"{type(problem).__name__}: {problem}")


class _Actors:
    def __init__(self, ray: ModuleType, actors: list[Any], job: Any) -> None:
        self._ray, self._job = ray, [job]
        self._coming = {actor.ready.remote(): actor for actor in actors}  # not placed yet
        self._here: list[Any] = []

    def about(self) -> About:
        while not self._arrived(_PATIENCE):
            log.warning("Waiting for the cluster to place a replica of the model.")
        with _as_it_was(self._ray):
            about: About = self._ray.get(self._here[0].about.remote(self._job))
        return about

    def shards(self, spans: Iterable[range], meter: Meter, budget: int) -> Iterator[Shard]:
        missing, failed = list(spans), list[_Failure]()
        pool = self._ray.util.ActorPool(list(self._here))
        for span in missing:
            pool.submit(lambda actor, span: actor.measure.remote(self._job, span, budget), span)
        succeeded = False
        while pool.has_next():
            for actor in self._arrived(0):
                pool.push(actor)
            try:
                with _as_it_was(self._ray):
                    found = pool.get_next_unordered(timeout=_GLANCE)
            except TimeoutError:
                continue  # another actor may have come
            except self._ray.exceptions.RayActorError as problem:
                # Ray has tried again; which shard it was shows at the end.
                found = _Failure(range(0), f"its worker died ({_first_line(problem)})")
            if isinstance(found, Shard):
                succeeded = True
                missing.remove(found.span)
                meter.close(found.values["noise"].size)
                yield found
                continue
            failed.append(found)
            log.warning("A shard failed: %s", found.reason)
            if not succeeded and len(failed) >= _HOPELESS:
                break
        if missing:
            raise ShardsFailed(missing, "; ".join(dict.fromkeys(failure.reason for failure in failed)))

    def _arrived(self, seconds: float) -> list[Any]:
        """The actors that were placed since the last look; the first ones are waited for."""
        if not self._coming:
            return []
        there, _ = self._ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)
        if not there and seconds:
            there, _ = self._ray.wait(list(self._coming), num_returns=1, timeout=seconds)
        new = [self._coming.pop(answer) for answer in there]
        self._here += new
        return new


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts its own answer to SIGTERM in place of ours, and then aborts on it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _as_it_was(ray: ModuleType) -> Iterator[None]:
    """A wrong use that an actor found, without Ray's account of where."""
    try:
        yield
    except ray.exceptions.RayTaskError as problem:
        cause = getattr(problem, "cause", None)
        if isinstance(cause, UnderstudyError):
            raise cause from None
        raise Unfinished(f"A worker failed: {type(cause).__name__}: {cause}") from problem


def _imported() -> ModuleType:
    try:
        import ray
        import ray.util
    except ImportError as problem:
        raise UnderstudyError(f"engine='ray' needs Ray: pip install 'understudy[ray]' ({problem}).") from problem
    module: ModuleType = ray
    return module


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
