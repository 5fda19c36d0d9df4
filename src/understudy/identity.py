"""What makes a run the one that it is: its model, its inputs, its protocol."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from understudy.anatomy import Anatomy
from understudy.inputs.batch import Inputs
from understudy.outcome import Outcome
from understudy.search import Search


@dataclass(frozen=True)
class Protocol:
    """What was asked: everything that decides the numbers apart from the model and the inputs."""

    layers: tuple[int, ...]
    units: str
    search: Search
    outcome: Outcome
    threshold: float


# What a config says about its file, not about the model.
_INCIDENTAL = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_commit_hash",
    "architectures",
    "dtype",
    "problem_type",  # set by the first forward that is given labels
)

# What makes a run the one that it is; the rest of the attributes is circumstance.
DECISIVE = ("model_hash", "inputs_hash", "layers", "units", "search", "threshold", "outcome", "dtype", "captured")


def attributes(body: Anatomy, inputs: Inputs, protocol: Protocol, dtype: torch.dtype) -> dict[str, Any]:
    """The attributes of a run that are known before it starts."""
    config = getattr(body.model, "config", None)
    known = {
        "model": body.name,
        "model_class": type(body.model).__name__,
        "revision": str(getattr(config, "_commit_hash", None) or ""),
        "model_hash": fingerprint(body),
        "inputs": json.dumps(dict(inputs.about), sort_keys=True),
        "inputs_hash": inputs.fingerprint(),
        "skipped": json.dumps(dict(inputs.skipped)),
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
    return {**known, "identity": of(known)}


def of(attributes: Mapping[str, Any]) -> str:
    """The identity of a run: a hash of what is decisive."""
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


def difference(there: Mapping[str, Any], here: Mapping[str, Any], ignore: Sequence[str] = ()) -> str:
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
