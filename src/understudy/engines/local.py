"""One worker, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from understudy.meter import Meter
from understudy.worker import About, Job, Shard, Worker


@dataclass(frozen=True)
class Local:
    """The engine that uses this process alone."""

    @contextmanager
    def open(self, job: Job) -> Iterator[_Alone]:
        """One worker, here."""
        with Worker(job) as worker:
            yield _Alone(worker)


class _Alone:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def about(self) -> About:
        return self._worker.about()

    def shards(self, spans: Iterable[range], meter: Meter, budget: int) -> Iterator[Shard]:
        return (self._worker.measure(span, meter, budget) for span in spans)
