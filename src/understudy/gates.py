"""Gates on the units of a model while its own forward runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy, Layer, anatomy
from understudy.errors import UnderstudyError
from understudy.surgery import eager, hooked

Gates = Mapping[tuple[int, int], float]


def spread(gates: Tensor, layer: Layer) -> Tensor:
    """Gates of units as factors of the site's input: `[..., units] -> [..., units * width]`."""
    return gates.repeat_interleave(layer.width, dim=-1)


@contextmanager
def gated(model: nn.Module, gates: Gates, *, units: str = "heads") -> Iterator[nn.Module]:
    """Run or generate under an intervention: `(layer, unit) -> gate`.

    >>> import understudy as us
    >>> model = us.load("digits")
    >>> with us.gated(model, {(-1, 3): 0.0, (-1, 5): 1.6}):
    ...     logits = model(**us.digits(4).batch(range(4))).logits

    A gate of 1 leaves a unit as it is, 0 removes it, any other number rescales its contribution to the residual
    stream. units: what is gated, "heads", "kv" or "neurons:N". Layers count from zero, negatives from the end. The
    gates hold for every forward inside the `with`, whatever mode the model is in; the model is as before after it. It
    is an error if no forward ran a gated layer.
    """
    body = anatomy(model).cut(units)
    factors = _by_layer(body, gates, units)
    applications: dict[nn.Module, list[int]] = {}
    for layer in body.sites:
        applications.setdefault(layer.site, []).append(layer.index)
    calls: dict[nn.Module, int] = dict.fromkeys(applications, 0)
    fired: set[int] = set()

    def restart(_module: nn.Module, _args: Any) -> None:
        # A forward that an exception cut short must not shift the count of the next one.
        calls.update(dict.fromkeys(calls, 0))

    def apply(site: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        # A site that serves several layers (ALBERT) is told apart by the count of its calls.
        indices = applications[site]
        index = indices[calls[site] % len(indices)]
        calls[site] += 1
        if index not in factors:
            return None
        fired.add(index)
        factor = factors[index].to(args[0].device, args[0].dtype)
        return (args[0] * factor, *args[1:])

    sites = {body.sites[index].site for index in factors}
    handles = [body.base.register_forward_pre_hook(restart)]
    handles += [site.register_forward_pre_hook(apply, prepend=True) for site in sites]
    with eager(model), hooked(handles):
        yield model
    silent = sorted(set(factors) - fired)
    if silent:
        raise UnderstudyError(
            f"Gates were set at layer {', '.join(map(str, silent))}, but no forward of the model ran there: "
            "run the model inside the `with`."
        )


def _by_layer(body: Anatomy, gates: Gates, units: str) -> dict[int, Tensor]:
    factors: dict[int, Tensor] = {}
    for place, gate in gates.items():
        if not (isinstance(place, tuple) and len(place) == 2 and all(isinstance(number, int) for number in place)):
            raise UnderstudyError(f"A gate is set by (layer, unit), such as (-1, 3), but {place!r} was given.")
        index, unit = place
        layer = body.sites[body.layer_index(index)]
        if not 0 <= unit < layer.units:
            raise UnderstudyError(
                f"Unit {unit} is not there: layer {layer.index} has {layer.units} {units.partition(':')[0]}, "
                f"0 to {layer.units - 1}."
            )
        if not isinstance(gate, int | float) or not math.isfinite(gate):
            raise UnderstudyError(
                f"The gate of unit {unit} at layer {layer.index} must be a finite number, not {gate!r}."
            )
        factors.setdefault(layer.index, torch.ones(layer.units))[unit] = float(gate)
    return {index: spread(value, body.sites[index]) for index, value in factors.items()}
