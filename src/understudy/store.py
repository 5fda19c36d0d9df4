"""A run on disk: a Zarr store whose chunks are shards of inputs, each with its checksum; how it is read.

What is read is never trusted: only the layout below is accepted, with codecs that cannot run code, and nothing outside
the run's folder is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from understudy import identity
from understudy.errors import UnderstudyError


@dataclass(frozen=True)
class Variable:
    """A variable of a run; `dims` come after `input`."""

    dims: tuple[str, ...]
    dtype: str
    fill: Any
    long_name: str


MEASURED, PENDING = "measured", "pending"

_PAIR = ("layer", "source", "substitute")
VARIABLES = {
    "substitutability": Variable(
        _PAIR, "float32", np.nan, "S(i→j), the share of the source's damage that the substitute recovers"
    ),
    "compensation": Variable(_PAIR, "float32", np.nan, "the gate of the substitute that recovers most"),
    "damage": Variable(_PAIR, "float32", np.nan, "D*(i→j), the KL divergence with that gate, as it was run"),
    "drop": Variable(("layer", "source"), "float32", np.nan, "D_drop(i), the KL divergence with the source removed"),
    "noise": Variable(("layer",), "float32", np.nan, "the KL divergence with all gates at one, in another batch shape"),
    "evaluations": Variable(("layer",), "int64", 0, "downstream evaluations that were run"),
    "seconds": Variable((), "float32", np.nan, "the time that the input took: its share of its batch"),
    # Written last: a shard is there when its status is.
    "status": Variable((), "object", PENDING, f"{MEASURED!r}, {PENDING!r}, or why the input has no numbers"),
}
NOISE_FACTOR = 100.0  # below this multiple of its noise a divergence says nothing
LOCK = ".lock"  # held by the process that writes
BOOKKEEPING = ("budget", "finished")  # attributes for the process that writes, not for readers
COORDINATES = ("input", "layer", "source", "substitute")

# What a chunk may be made of. Other codecs are refused: one of them unpickles what it reads.
_CODECS = {"bytes", "zstd", "crc32c", "vlen-utf8"}

_TYPES = {"float32": "float32", "int64": "int64", "object": "string"}

# Attributes that readers rely on.
_TEXTS = ("identity", "model", "model_class", "inputs", "skipped", "units", "search", "outcome", "dtype", "captured")
_NUMBERS = ("threshold", "zero")

# More inputs, or larger chunks, are not believed: a few bytes could ask for all memory.
_MOST_INPUTS, _MOST_NUMBERS = 2**24, 2**28

_SLAB = 2**26  # bytes that a check reads at a time


def dataset(values: Mapping[str, np.ndarray], coords: Mapping[str, Any], attributes: Mapping[str, Any]) -> xr.Dataset:
    """A run in memory."""
    variables = {
        name: (("input", *VARIABLES[name].dims), value, {"long_name": VARIABLES[name].long_name})
        for name, value in values.items()
    }
    return with_totals(xr.Dataset(variables, coords, dict(attributes)))


def with_totals(run: xr.Dataset) -> xr.Dataset:
    """The run with what all of its inputs took among its attributes."""
    seconds = float(run["seconds"].sum())
    return run.assign_attrs(evaluations=int(run["evaluations"].sum()), seconds=round(seconds, 3))


def open_run(path: str | Path, *, verify: bool = True) -> xr.Dataset:
    """Open a run from its Zarr store, lazily; of a run that is still being measured, the inputs that are done.

    >>> import understudy as us
    >>> run = us.open_run("understudy-demo/digits.zarr")  # doctest: +SKIP

    verify: read every chunk once, so that damage shows here and not later.
    """
    where = Path(path)
    if not where.exists():
        raise UnderstudyError(f"There is no run at {where}.")
    check_layout(where)
    try:
        # Nothing in it needs decoding, and what needs none cannot fail later.
        run = xr.open_zarr(where, chunks=None, consolidated=True, zarr_format=3, decode_cf=False)
        status = run["status"].values.astype(object)
        # zarr's own strings do not compare, sort or cast as those of pandas and NumPy do.
        run = run.assign(status=run["status"].copy(data=status)).assign_coords(
            input=("input", run["input"].values.astype(object), run["input"].attrs)
        )
    except Exception as problem:
        raise UnderstudyError(f"{where} is not a run of understudy, or is damaged: {_first_line(problem)}") from problem
    unit = np.arange(run.sizes["source"])
    layers, ids = run["layer"].values.tolist(), run["input"].values.tolist()
    right = layers == list(run.attrs["layers"]) and len(set(ids)) == len(ids) and all(ids)
    if not right or any((run[name].values != unit).any() for name in ("source", "substitute")):
        raise UnderstudyError(f"{where} is damaged: its coordinates are not those that it was measured with.")
    done = np.flatnonzero(status != PENDING)
    if verify and (spans := damaged(where)):
        raise UnderstudyError(
            f"{where} is damaged: {named(run['input'].values, spans)} cannot be read. The command that measured it "
            "measures these again."
        )
    if len(done) < len(status):
        run = run.isel(input=done).assign_attrs(asked=len(status))  # still being measured
    kept = {name: value for name, value in run.attrs.items() if name not in BOOKKEEPING}
    return with_totals(run.drop_attrs(deep=False).assign_attrs(kept))


def check_layout(path: Path) -> dict[str, Any]:
    """The root's attributes, after a look at everything that decides what reading does."""
    try:
        root = json.loads((path / "zarr.json").read_text(encoding="utf-8"))
        arrays = {name: _Array.of(found) for name, found in root["consolidated_metadata"]["metadata"].items()}
        attributes = dict(root["attributes"])
        skipped = json.loads(attributes.get("skipped", "{}"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise UnderstudyError(f"{path} is not a run of understudy, or is damaged.") from problem
    missing = sorted({*VARIABLES, *COORDINATES} - set(arrays))
    missing += [name for name in _TEXTS if not isinstance(attributes.get(name), str)]
    missing += [name for name in _NUMBERS if not isinstance(attributes.get(name), int | float)]
    if missing or not isinstance(skipped, dict):
        raise UnderstudyError(f"{path} is not a run of understudy: it has no {', '.join(missing) or 'skipped'}.")
    if strange := sorted(set(arrays) - {*VARIABLES, *COORDINATES}):
        raise UnderstudyError(f"{path} is not a run of understudy: what is {strange[0]!r}?")
    if codecs := sorted({codec for array in arrays.values() for codec in array.codecs} - _CODECS):
        raise UnderstudyError(f"{path} uses the codec {codecs[0]!r}, which is not read: it may run code.")
    sizes = {name: arrays[name].shape for name in COORDINATES}
    for name, array in arrays.items():
        dims = (name,) if name in COORDINATES else ("input", *VARIABLES[name].dims)
        if array.shape != sum((sizes[dim] for dim in dims), ()) or not array.sensible:
            raise UnderstudyError(f"{path} is damaged: {name} has the shape {array.shape}.")
        kind = {"input": "string"}.get(name, "int64") if name in COORDINATES else _TYPES[VARIABLES[name].dtype]
        if array.kind != kind:
            raise UnderstudyError(f"{path} is damaged: {name} has the type {array.kind}, not {kind}.")
    try:
        told = identity.of(attributes) == attributes["identity"] and math.isfinite(attributes["threshold"])
    except (KeyError, TypeError, ValueError):
        told = False
    if not told:
        raise UnderstudyError(f"{path} is damaged: its attributes do not fit its identity.")
    _refuse_links(path)
    return attributes


@dataclass(frozen=True)
class _Array:
    """What the metadata of an array says."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    codecs: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> _Array:
        chunk = found["chunk_grid"]["configuration"]["chunk_shape"]
        codecs = tuple(str(codec["name"]) for codec in found["codecs"])
        return cls(tuple(map(int, found["shape"])), tuple(map(int, chunk)), codecs, str(found["data_type"]))

    @property
    def sensible(self) -> bool:
        """Whether it can be what this package wrote."""
        return (
            len(self.shape) == len(self.chunk)
            and all(0 <= size <= _MOST_INPUTS for size in self.shape)
            and all(chunk >= 1 for chunk in self.chunk)
            and math.prod(self.chunk) <= _MOST_NUMBERS
        )


def _refuse_links(path: Path) -> None:
    """A run has no links: one could lead to anything, for reading and for writing."""
    for folder, folders, files in os.walk(path, followlinks=False):
        for name in (*folders, *files):
            part = Path(folder, name)
            if part.is_symlink():
                raise UnderstudyError(f"{path} holds a link ({part.relative_to(path)}), which a run never does.")


def same_values(group: Any, name: str, values: Any) -> bool:
    """Whether a coordinate on disk can be read, and is this one."""
    try:
        there = np.asarray(group[name][:]).astype(object)
        return chunk_file(group, name, range(0)).is_file() and bool((there == np.asarray(values, dtype=object)).all())
    except Exception:  # whatever the codecs say of bytes that are not theirs
        return False


def damaged(path: Path) -> list[range]:
    """The shards that say that they are done but cannot be read."""
    import zarr

    group = zarr.open_group(path, mode="r", zarr_format=3)
    shards = list(spans(group))
    try:
        status = np.asarray(group["status"][:]).astype(object)
        if all(_readable(group, part) for part in _slabs(group, shards, status)):
            return []
    except Exception:
        status = None
    return [shard for shard in shards if not _whole(group, shard, status)]


def spans(group: Any) -> Iterator[range]:
    """The shards of a run."""
    count, size = group["status"].shape[0], group["status"].chunks[0]
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def named(ids: Sequence[Any], parts: Sequence[range], most: int = 3) -> str:
    """Some inputs, by name."""
    names = [str(ids[index]) for part in parts for index in part]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{'input' if len(names) == 1 else 'inputs'} {', '.join(names[:most])}{more}"


def _slabs(group: Any, shards: Sequence[range], status: np.ndarray) -> Iterator[list[range]]:
    """Shards that are done, as many at a time as are read at once."""
    each = sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for _, array in group.arrays() if array.ndim > 1)
    step = max(1, _SLAB // max(1, each * len(shards[0])))
    done = [shard for shard in shards if (status[shard.start : shard.stop] != PENDING).any()]
    return (done[start : start + step] for start in range(0, len(done), step))


def _readable(group: Any, part: Sequence[range]) -> bool:
    ours = "finished" in group.attrs  # a copy that xarray wrote leaves out chunks without a value
    for name in VARIABLES:
        if ours and not all(chunk_file(group, name, shard).is_file() for shard in part):
            return False
        group[name][part[0].start : part[-1].stop]  # every checksum in it
    return True


def _whole(group: Any, shard: range, status: np.ndarray | None) -> bool:
    try:
        here = status[shard.start : shard.stop] if status is not None else group["status"][shard.start : shard.stop]
        done = np.asarray(here).astype(object) != PENDING
        return not done.any() or (bool(done.all()) and _readable(group, [shard]))
    except Exception:  # whatever the codecs say of bytes that are not theirs
        return False


def chunk_file(group: Any, name: str, shard: range) -> Path:
    """Where the chunk of a shard is."""
    array = group[name]
    key = str(array.metadata.encode_chunk_key((shard.start // array.chunks[0], *(0,) * (array.ndim - 1))))
    return Path(group.store.root) / name / key


def concat(runs: Sequence[xr.Dataset]) -> xr.Dataset:
    """Runs of the same model and protocol on different inputs, as one.

    Runs that were made differently do not concatenate: the difference is named.
    """
    if isinstance(runs, xr.Dataset) or not runs:
        raise UnderstudyError("Give the runs to concatenate as a list: concat([run_a, run_b]).")
    for other in runs[1:]:
        difference = identity.difference(runs[0].attrs, other.attrs, ignore=("inputs", "inputs_hash"))
        if difference:
            raise UnderstudyError(f"These runs were made differently and cannot be one: {difference}.")
    joined = xr.concat(runs, dim="input", join="exact", combine_attrs="drop")
    twice = joined.indexes["input"][joined.indexes["input"].duplicated()]
    if len(twice):
        raise UnderstudyError(f"Input {twice[0]!r} is in more than one of these runs.")
    hashes = [str(run.attrs["inputs_hash"]) for run in runs]
    attributes = {**runs[0].attrs, "inputs_hash": hashlib.sha256("".join(hashes).encode()).hexdigest()}
    for name in ("evaluations", "seconds"):
        attributes[name] = sum(run.attrs[name] for run in runs)
    attributes["identity"] = identity.of(attributes)
    return joined.assign_attrs(attributes)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
