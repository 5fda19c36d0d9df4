"""Where shards are measured: in this process, or spread over a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from understudy.errors import UnderstudyError
from understudy.meter import Meter
from understudy.worker import About, Job, Shard


class ShardsFailed(Exception):
    """Shards that kept failing after all others were done, and why."""

    def __init__(self, spans: list[range], reason: str) -> None:
        super().__init__(reason)
        self.spans, self.reason = spans, reason


class Pool(Protocol):
    """Workers that are ready."""

    def about(self) -> About:
        """What the run will be, as a worker sees it."""

    def shards(self, spans: Iterable[range], meter: Meter, budget: int) -> Iterator[Shard]:
        """The shards as they are done, in any order."""


class Engine(Protocol):
    """A way to get workers."""

    def open(self, job: Job) -> AbstractContextManager[Pool]:
        """Workers for a job, until the end of the `with`."""


def as_engine(engine: str | Engine) -> Engine:
    """An engine by its name, or as it is."""
    if not isinstance(engine, str):
        return engine
    if engine == "local":
        from understudy.engines.local import Local

        return Local()
    if engine == "ray":
        from understudy.engines.ray import Ray

        return Ray()
    raise UnderstudyError(f"Engine {engine!r} is not known: possible are 'local' and 'ray'.")
