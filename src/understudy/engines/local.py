"""One worker, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from understudy.engines import ShardsFailed
from understudy.errors import UnderstudyError
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
        failed: dict[range, str] = {}
        succeeded = False
        for span in spans:
            try:
                shard = self._worker.measure(span, meter, budget)
            except UnderstudyError as problem:
                if not succeeded:  # wrong from the start
                    raise
                failed[span] = str(problem)  # a file that vanished: the others still are there
                continue
            succeeded = True
            yield shard
        if failed:
            raise ShardsFailed(list(failed), "; ".join(dict.fromkeys(failed.values())))
