"""The run's result: an xarray.Dataset in memory, or the same as a Zarr store on disk."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from understudy.anatomy import Anatomy
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.outcome import Outcome
from understudy.search import Search

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


@dataclass(frozen=True)
class Protocol:
    """What was asked: everything that decides the numbers apart from the model and the inputs."""

    layers: tuple[int, ...]
    units: str
    search: Search
    outcome: Outcome
    threshold: float


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
        attributes = _attributes(body, inputs, protocol, dtype)
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
            raise UnderstudyError(f"{self.path} cannot be written: {problem}.") from problem
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
        raise UnderstudyError(f"{where} is not a run that can be read: {problem}") from problem
    missing = [name for name in VARIABLES if name not in run] + ["identity"] * ("identity" not in run.attrs)
    if missing:
        raise UnderstudyError(f"{where} is not a run of understudy: it has no {', '.join(missing)}.")
    return run


def concat(runs: Sequence[xr.Dataset]) -> xr.Dataset:
    """Runs of the same model and protocol on different inputs, as one.

    Runs that were made differently do not concatenate: the difference is named.
    """
    if not runs:
        raise UnderstudyError("There are no runs to concatenate.")
    for other in runs[1:]:
        difference = _difference(runs[0].attrs, other.attrs, ignore=("inputs", "inputs_hash"))
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
    attributes["identity"] = _identity(attributes)
    return joined.assign_attrs(attributes)


# What a config says about its file, not about the model.
_INCIDENTAL = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "architectures", "dtype")

# What makes a run the one that it is; the rest of the attributes is circumstance.
DECISIVE = ("model_hash", "inputs_hash", "layers", "units", "search", "threshold", "outcome", "dtype", "captured")


def _attributes(body: Anatomy, inputs: Inputs, protocol: Protocol, dtype: torch.dtype) -> dict[str, Any]:
    config = getattr(body.model, "config", None)
    attributes = {
        "model": body.name,
        "model_class": type(body.model).__name__,
        "revision": str(getattr(config, "_commit_hash", None) or ""),
        "model_hash": fingerprint(body),
        "inputs": json.dumps(dict(inputs.about), sort_keys=True),
        "inputs_hash": inputs.fingerprint(),
        "layers": list(protocol.layers),
        "units": protocol.units,
        "search": protocol.search.name,
        "zero": protocol.search.zero,
        "threshold": protocol.threshold,
        "outcome": protocol.outcome,
        "dtype": str(dtype).removeprefix("torch."),
        "captured": str(body.dtype).removeprefix("torch."),
        "device": body.device.type,
        "seed": int(inputs.about.get("seed", 0)),
        "versions": ", ".join(
            [f"python {platform.python_version()}"]
            + [f"{name} {version(name)}" for name in ("understudy", "torch", "transformers")]
        ),
    }
    return {**attributes, "identity": _identity(attributes)}


def _identity(attributes: Mapping[str, Any]) -> str:
    decisive = json.dumps([attributes[name] for name in DECISIVE], sort_keys=True)
    return hashlib.sha256(decisive.encode()).hexdigest()


def fingerprint(body: Anatomy) -> str:
    """A hash of what the model computes: its class, config, heads, adapters and weights."""
    digest = hashlib.sha256(type(body.model).__name__.encode())
    config = getattr(body.model, "config", None)
    if config is not None:
        settings = {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(str([(layer.units, layer.width) for layer in body.layers]).encode())
    for name, module in body.model.named_modules():
        if hasattr(module, "active_adapters"):  # PEFT: which adapters act, and how strongly
            state = [getattr(module, key, None) for key in ("active_adapters", "disable_adapters", "scaling")]
            digest.update(f"{name} {state}".encode())
    for name, value in body.model.state_dict().items():
        if not isinstance(value, Tensor):  # a quantized module's own description
            digest.update(f"{name} {value}".encode())
            continue
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.device.type == "meta":
            value = _offloaded(body, name)
        if value is None or value.numel() == 0:
            continue
        # Reading every value by SHA would take longer than measuring a large model: a reduction over all values,
        # and the first and the spread-out ones in their order.
        flat = value.detach().flatten()
        spread = flat[:: max(1, len(flat) // 1024)].cpu().contiguous()
        digest.update(spread.view(torch.uint8).numpy().tobytes())
        digest.update(str(torch.hash_tensor(flat).item()).encode())
    return digest.hexdigest()


def _offloaded(body: Anatomy, name: str) -> Tensor | None:
    owner, _, leaf = name.rpartition(".")
    weights = getattr(getattr(body.model.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    try:
        return None if weights is None else torch.as_tensor(weights[leaf])
    except KeyError:
        return None


def _same_run(path: Path, attributes: Mapping[str, Any]) -> xr.Dataset:
    there = open_run(path)
    if there.attrs["identity"] == attributes["identity"]:
        return there
    raise UnderstudyError(
        f"{path} holds a run that was made with other settings ({_difference(there.attrs, attributes)}). "
        "It was left as it is: choose another output, or remove it."
    )


def _difference(there: Mapping[str, Any], here: Mapping[str, Any], ignore: Sequence[str] = ()) -> str:
    """The settings in which two runs differ, in words."""
    words = {"model_hash": "weights", "inputs_hash": "inputs"}
    parts = []
    for name in DECISIVE:
        if name in ignore or there.get(name) == here.get(name):
            continue
        if name in words:
            parts.append(f"other {words[name]}")
        else:
            parts.append(f"{name} {there.get(name)} there, {here.get(name)} here")
    return "; ".join(parts)
