"""A run being written: shards of inputs as they finish, in memory or into a Zarr store that is whole at any moment.

The store is at its final place from the start. A chunk is a shard; each is written beside its place and renamed, with
a checksum inside; the status of a shard's inputs is written last. Killed at any moment, a run has all shards whose
status says so, and the same command goes on with the others.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xarray as xr
from filelock import FileLock, Timeout

from understudy import identity
from understudy.errors import UnderstudyError, Unfinished
from understudy.store import (
    COORDINATES,
    LOCK,
    MEASURED,
    PENDING,
    VARIABLES,
    check_layout,
    chunk_file,
    damaged,
    dataset,
    named,
    open_run,
    same_values,
)
from understudy.worker import About, Shard

log = logging.getLogger(__name__)


class Run:
    """A run being written. `with Run(path, about) as run:` holds the store until the end."""

    def __init__(self, path: str | Path | None, about: About, *, budget: int) -> None:
        self.path, self.about, self.budget = None if path is None else Path(path).absolute(), about, budget
        self.ids = [str(name) for name in about.coords["input"]]
        self._arrays: dict[str, Any] = {}
        self._lock: FileLock | None = None

    @property
    def finished(self) -> xr.Dataset | None:
        """The run as it is on disk, if nothing is left to measure. Another run there is refused."""
        if self.path is None or not self.path.exists() or self._unborn(self.path):
            return None
        there = self._refuse_other(self.path)
        if not there.get("finished") or damaged(self.path):
            return None
        try:
            run = open_run(self.path, verify=False)
        except UnderstudyError:  # what can be mended is
            return None
        return None if "asked" in run.attrs else run

    def __enter__(self) -> Self:
        if self.path is None:
            self._shard = self.about.shard
            self._arrays = {
                name: np.full(shape, VARIABLES[name].fill, VARIABLES[name].dtype) for name, shape in self._shapes()
            }
            return self
        with self._writing(self.path):
            self._begin(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def pending(self) -> list[range]:
        """The shards that are not done."""
        size, count = self._shard, len(self.ids)
        status = np.asarray(self._arrays["status"][:]).astype(object)
        parts = (range(start, min(start + size, count)) for start in range(0, count, size))
        return [part for part in parts if (status[part.start : part.stop] == PENDING).any()]

    def write(self, shard: Shard) -> None:
        """A shard that is done; its status goes last."""
        at = slice(shard.span.start, shard.span.stop)
        if self.path is None:
            for name, array in self._arrays.items():
                array[at] = shard.values[name]
            return
        with self._writing(self.path):
            self._refuse_vanished(self.path)
            for name in VARIABLES:
                self._arrays[name][at] = shard.values[name]
            if shard.budget < self.budget:
                self.budget = shard.budget
                self._note(budget=self.budget)

    def finish(self) -> xr.Dataset:
        """The finished run, opened lazily where it is on disk."""
        status = np.asarray(self._arrays["status"][:]).astype(object)
        if not (status == MEASURED).any():
            raise UnderstudyError(
                f"None of the {len(status)} inputs could be measured. Of input {self.ids[0]!r}: {status[0]}. The "
                "model's weights or the inputs hold NaN or infinity, or its precision overflows."
            )
        if self.path is None:
            return dataset(self._arrays, self.about.coords, self.about.attributes)
        with self._writing(self.path):
            spent = {name: self._arrays[name][:].sum() for name in ("evaluations", "seconds")}
            self._note(evaluations=int(spent["evaluations"]), seconds=float(spent["seconds"]), finished=True)
        return open_run(self.path, verify=False)

    # The store.

    def _begin(self, path: Path) -> None:
        import zarr

        if path.exists() and not path.is_dir():
            raise UnderstudyError(f"{path} is a file, not a run: choose another output.")
        path.mkdir(parents=True, exist_ok=True)
        if not self._unborn(path):
            self._refuse_other(path)
        self._lock = FileLock(path / LOCK, timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            self._lock = None
            raise UnderstudyError(
                f"{path} is being written by another process: wait for it, or choose another output."
            ) from None
        self._inode = (path / LOCK).stat().st_ino
        if self._unborn(path):
            self._create(path)
        known = self._refuse_other(path)
        self.budget = min(self.budget, int(known.get("budget") or self.budget))
        group = zarr.open_group(path, mode="r+", zarr_format=3)
        self._arrays = {name: group[name].with_config({"write_empty_chunks": True}) for name in VARIABLES}
        self._shard = group["status"].chunks[0]
        self._forget_damaged(path, group)

    def _forget_damaged(self, path: Path, group: Any) -> None:
        for name in VARIABLES:
            for leftover in (path / name).rglob("*.partial"):  # of a process that was killed while it wrote
                leftover.unlink(missing_ok=True)
        for name, values in self.about.coords.items():
            if not same_values(group, name, values):
                chunk_file(group, name, range(0)).unlink(missing_ok=True)
                group[name][:] = values
        bad = damaged(path)
        if not bad:
            return
        log.warning("On disk, %s cannot be read any more: measured again.", named(self.ids, bad))
        self._note(finished=False)
        for part in bad:
            for name in reversed(VARIABLES):  # the status first: without it, nothing is there
                chunk_file(group, name, part).unlink(missing_ok=True)

    def _create(self, path: Path) -> None:
        import zarr
        from zarr.codecs import Crc32cCodec, ZstdCodec

        codecs = (ZstdCodec(), Crc32cCodec())
        coords = xr.Dataset(coords=dict(self.about.coords))
        with warnings.catch_warnings():
            # zarr notes that other implementations may not know strings and consolidated metadata; xarray does.
            warnings.simplefilter("ignore")
            encoding = {name: {"compressors": codecs} for name in self.about.coords}
            for part in path.iterdir():
                if part.name != LOCK and _ours(part.name):
                    shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
            coords.to_zarr(path, mode="a", consolidated=False, zarr_format=3, encoding=encoding)
            group = zarr.open_group(path, mode="r+", zarr_format=3)
            for name, shape in self._shapes():
                variable = VARIABLES[name]
                group.create_array(
                    name,
                    shape=shape,
                    chunks=(self.about.shard, *shape[1:]),
                    dtype=str if variable.dtype == "object" else variable.dtype,
                    fill_value=variable.fill,
                    compressors=codecs,
                    dimension_names=("input", *variable.dims),
                    attributes={"long_name": variable.long_name},
                )
            group.attrs.update({**self.about.attributes, "budget": 0, "finished": False})
            zarr.consolidate_metadata(path)  # last: without it, nothing was begun

    def _refuse_vanished(self, path: Path) -> None:
        """A store that was removed or replaced meanwhile: what zarr would write then is no run any more."""
        try:
            held = (path / LOCK).stat().st_ino == self._inode and (path / "zarr.json").exists()
        except FileNotFoundError:
            held = False
        if not held:
            raise Unfinished(f"{path} was removed or replaced while it was being written: nothing of it is kept.")

    def _note(self, **values: Any) -> None:
        import zarr

        # The attributes, and the metadata of everything, are one file that is replaced at once.
        zarr.open_group(self.path, mode="r+", zarr_format=3, use_consolidated=True).attrs.update(values)

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        sizes = {name: len(value) for name, value in self.about.coords.items()}
        for name, variable in VARIABLES.items():
            yield name, tuple(sizes[dim] for dim in ("input", *variable.dims))

    def _unborn(self, path: Path) -> bool:
        """Whether nothing is there, or only what a process of ours left that was killed before it had begun."""
        if not path.is_dir():
            return False
        names = {part.name for part in path.iterdir()}
        if not names:
            return True
        if LOCK not in names or any(not _ours(name) for name in names) or any(path.glob("status/c/*")):
            return False
        root = path / "zarr.json"
        # The metadata of all arrays are added last.
        return not root.exists() or b'"consolidated_metadata"' not in root.read_bytes()

    def _refuse_other(self, path: Path) -> Mapping[str, Any]:
        """The attributes of the run at this place, if it is this one."""
        try:
            there = check_layout(path)
        except UnderstudyError as problem:
            raise UnderstudyError(f"{problem} It was left as it is: choose another output.") from problem
        here = self.about.attributes
        if there["identity"] != here["identity"]:
            raise UnderstudyError(
                f"{path} holds a run that was made with other settings ({identity.difference(there, here)}). "
                "It was left as it is: choose another output, or remove it."
            )
        return there

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except UnderstudyError:
            raise
        except OSError as problem:
            raise Unfinished(
                f"{path} cannot be written: {problem.strerror or problem}. What was finished before is kept; when that "
                "is mended, the same command goes on."
            ) from problem


def _ours(name: str) -> bool:
    """Whether a run has a file or folder of this name."""
    return name in (LOCK, "zarr.json", *VARIABLES, *COORDINATES) or name.endswith(".partial")
