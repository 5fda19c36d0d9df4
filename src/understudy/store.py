"""The run's result: an xarray.Dataset in memory, or the same as a Zarr store on disk."""

from __future__ import annotations

import hashlib
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from understudy import identity
from understudy.anatomy import Anatomy
from understudy.errors import UnderstudyError
from understudy.identity import Protocol
from understudy.inputs.batch import Inputs

# Dimensions after `input`; every variable is float32.
VARIABLES: dict[str, tuple[str, ...]] = {
    "substitutability": ("layer", "source", "substitute"),
    "compensation": ("layer", "source", "substitute"),
    "damage": ("layer", "source", "substitute"),
    "drop": ("layer", "source"),
    "noise": ("layer",),
}
LONG_NAMES = {
    "substitutability": "S(i→j), the share of the source's damage that the substitute recovers",
    "compensation": "the gate of the substitute that recovers most",
    "damage": "D*(i→j), the KL divergence with that gate, as it was run",
    "drop": "D_drop(i), the KL divergence with the source removed",
    "noise": "the KL divergence with all gates at one, in another batch shape",
}

# A chunk holds as many inputs as make about this many bytes of a matrix.
_CHUNK = 2**20


class Run:
    """A run being written. In memory, or beside its final place on disk until it is complete."""

    def __init__(self, path: Path | None, attributes: Mapping[str, Any], coords: Mapping[str, Any]) -> None:
        self.path, self.attributes, self.evaluations = path, dict(attributes), 0
        self.finished: xr.Dataset | None = None
        self._partial = None if path is None else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        self._coords = dict(coords)
        self._arrays: dict[str, Any] = {}
        self._pending: list[dict[str, Any]] = []
        self._written, self._chunk = 0, 1

    @classmethod
    def begin(
        cls,
        path: str | Path | None,
        body: Anatomy,
        inputs: Inputs,
        protocol: Protocol,
        dtype: torch.dtype,
    ) -> Self:
        """A new run; where `path` already holds the same one, that one, finished."""
        units = {body.layers[layer].units for layer in protocol.layers}
        if len(units) > 1:
            raise UnderstudyError(
                f"The layers have different numbers of heads ({sorted(units)}): measure those with the same number."
            )
        attributes = identity.attributes(body, inputs, protocol, dtype)
        number = np.arange(units.pop())
        coords = {
            "input": np.array(inputs.ids, dtype=object),
            "layer": np.array(protocol.layers),
            "source": number,
            "substitute": number,
        }
        target = None if path is None else Path(path).absolute()
        run = cls(target, attributes, coords)
        if target is not None and target.exists():
            run.finished = _same_run(target, attributes)
        return run

    def __enter__(self) -> Self:
        shapes = {name: len(value) for name, value in self._coords.items()}
        if self._partial is None:
            for name, dims in VARIABLES.items():
                shape = tuple(shapes[dim] for dim in ("input", *dims))
                self._arrays[name] = np.full(shape, np.nan, dtype=np.float32)
            return self
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._create(shapes)
        except OSError as problem:
            self._discard()
            raise UnderstudyError(f"{self.path} cannot be written: {problem.strerror or problem}.") from problem
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _create(self, shapes: Mapping[str, int]) -> None:
        import zarr

        # The layout is the final one from the start; xarray writes it without values, we fill it.
        matrix = 4 * shapes["layer"] * shapes["source"] * shapes["substitute"]
        self._chunk = max(1, min(shapes["input"], _CHUNK // matrix))
        empty = xr.Dataset(coords=self._coords)
        empty.to_zarr(self._partial, mode="w-", consolidated=False)
        group = zarr.open_group(self._partial, mode="r+")
        for name, dims in VARIABLES.items():
            shape = tuple(shapes[dim] for dim in ("input", *dims))
            self._arrays[name] = group.create_array(
                name,
                shape=shape,
                chunks=(self._chunk, *shape[1:]),
                dtype="float32",
                fill_value=float("nan"),
                dimension_names=("input", *dims),
                attributes={"long_name": LONG_NAMES[name]},
            )

    def write(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """The variables of the next inputs, one mapping a layer; on disk, whole chunks at a time."""
        block = {name: torch.stack([values[name] for values in layers], 1).float().numpy() for name in VARIABLES}
        self._pending.append(block)
        if sum(len(block["noise"]) for block in self._pending) >= self._chunk:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        whole = {name: np.concatenate([block[name] for block in self._pending]) for name in VARIABLES}
        at = slice(self._written, self._written + len(whole["noise"]))
        for name, value in whole.items():
            self._arrays[name][at] = value
        self._written, self._pending = at.stop, []

    def finish(self, *, seconds: float) -> xr.Dataset:
        """The finished run, opened lazily where it is on disk."""
        self._flush()
        attributes = {**self.attributes, "evaluations": self.evaluations, "seconds": round(seconds, 3)}
        if self._partial is None or self.path is None:
            variables = {
                name: (("input", *dims), self._arrays[name], {"long_name": LONG_NAMES[name]})
                for name, dims in VARIABLES.items()
            }
            return xr.Dataset(variables, self._coords, attributes)
        import zarr

        group = zarr.open_group(self._partial, mode="r+")
        group.attrs.update(attributes)
        with warnings.catch_warnings():
            # zarr notes that other implementations may not know consolidated metadata; xarray warns without it.
            warnings.simplefilter("ignore", UserWarning)
            zarr.consolidate_metadata(self._partial)
        if self.path.exists():
            raise UnderstudyError(f"{self.path} appeared while this run was measured; it was left as it is.")
        self._partial.rename(self.path)
        return open_run(self.path)

    def _discard(self) -> None:
        if self._partial is not None and self._partial.exists():
            shutil.rmtree(self._partial)


def open_run(path: str | Path) -> xr.Dataset:
    """Open a run from its Zarr store, lazily.

    >>> import understudy as us
    >>> run = us.open_run("understudy-demo/digits.zarr")  # doctest: +SKIP
    """
    where = Path(path)
    if not where.exists():
        raise UnderstudyError(f"There is no run at {where}.")
    try:
        run: xr.Dataset = xr.open_zarr(where, chunks=None)
    except Exception as problem:
        raise UnderstudyError(f"{where} is not a run of understudy, or is damaged.") from problem
    missing = [name for name in VARIABLES if name not in run] + ["identity"] * ("identity" not in run.attrs)
    if missing:
        raise UnderstudyError(f"{where} is not a run of understudy: it has no {', '.join(missing)}.")
    return run


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


def _same_run(path: Path, attributes: Mapping[str, Any]) -> xr.Dataset:
    try:
        there = open_run(path)
    except UnderstudyError as problem:
        raise UnderstudyError(f"{problem} It was left as it is: choose another output.") from problem
    if there.attrs["identity"] == attributes["identity"]:
        return there
    raise UnderstudyError(
        f"{path} holds a run that was made with other settings ({identity.difference(there.attrs, attributes)}). "
        "It was left as it is: choose another output, or remove it."
    )
