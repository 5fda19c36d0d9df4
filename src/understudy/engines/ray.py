"""Shards over the actors of a Ray cluster, each with one replica of the model.

Ray places the actors, starts those again that die, and repeats what they were doing; nothing of that is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.engines import ShardsFailed
from understudy.errors import UnderstudyError
from understudy.meter import Meter
from understudy.worker import About, Job, Shard, Worker

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

# A shard is tried again this often after its actor died; a shard that kills every actor must not go on for ever.
RETRIES = 3
# So many shards in a row that fail, with none that succeeds, are no accident.
_HOPELESS = 3


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
            try:
                ray.init(address=self.address, include_dashboard=False, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as problem:
                raise UnderstudyError(f"There is no Ray cluster at {self.address}: {problem}") from problem
        actors: list[Any] = []
        try:
            there = ray.cluster_resources()
            room = self._room(there)
            options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": -1, "max_task_retries": RETRIES}
            kind, shared = ray.remote(_Replica).options(**options), ray.put(job)
            actors += [kind.remote() for _ in range(min(self.workers or room, room))]
            yield _Actors(ray, actors, shared)
        finally:
            for actor in actors:
                ray.kill(actor)
            if started:
                ray.shutdown()

    def _room(self, there: dict[str, float]) -> int:
        """How many replicas the cluster has room for."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        room = min((int(there.get(kind, 0) / amount) for kind, amount in wanted.items() if amount), default=1)
        if room < 1:
            raise UnderstudyError(
                f"The cluster has no room for one replica with {self.cpus:g} CPUs and {self.gpus:g} GPUs: it has "
                f"{there.get('CPU', 0):g} and {there.get('GPU', 0):g}."
            )
        return room


@dataclass(frozen=True)
class _Failure:
    span: range
    reason: str


class _Replica:
    """An actor. Its worker is opened when it is first asked: one that Ray started again has nothing else to go by."""

    def __init__(self) -> None:
        self._opened: Worker | None = None

    def _worker(self, job: list[Any]) -> Worker:
        if self._opened is None:
            # In a list it is a reference, fetched once and not for every shard.
            self._opened = Worker(_imported().get(job[0])).__enter__()  # it lives as long as the actor
        return self._opened

    def about(self, job: list[Any]) -> About:
        return self._worker(job).about()

    def measure(self, job: list[Any], span: range, budget: int) -> Shard | _Failure:
        try:
            return self._worker(job).measure(span, Meter(None, 0), budget)
        except UnderstudyError:
            raise
        except Exception as problem:
            return _Failure(span, f"{type(problem).__name__}: {problem}")


class _Actors:
    def __init__(self, ray: ModuleType, actors: list[Any], job: Any) -> None:
        self._ray, self._actors, self._job = ray, actors, [job]

    def about(self) -> About:
        with _as_it_was(self._ray):
            about: About = self._ray.get(self._actors[0].about.remote(self._job))
        return about

    def shards(self, spans: Iterable[range], meter: Meter, budget: int) -> Iterator[Shard]:
        missing, failed = list(spans), list[_Failure]()
        pool = self._ray.util.ActorPool(self._actors)
        for span in missing:
            pool.submit(lambda actor, span: actor.measure.remote(self._job, span, budget), span)
        succeeded = False
        while pool.has_next():
            try:
                with _as_it_was(self._ray):
                    found = pool.get_next_unordered()
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


@contextmanager
def _as_it_was(ray: ModuleType) -> Iterator[None]:
    """A wrong use that an actor found, without Ray's account of where."""
    try:
        yield
    except ray.exceptions.RayTaskError as problem:
        cause = getattr(problem, "cause", None)
        if isinstance(cause, UnderstudyError):
            raise cause from None
        raise


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
