"""Routing while the model runs: its own forward keeps, for each input, the heads that a router chooses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy
from understudy.errors import UnderstudyError
from understudy.gates import spread
from understudy.inputs.batch import Batch
from understudy.routing.residual import places, summarize
from understudy.routing.router import Router
from understudy.surgery import eager, hooked


@dataclass
class Choices:
    """The masks that were chosen inside a `with routed(...)`, batch by batch: bool `[inputs, units]` by layer."""

    masks: dict[int, list[Tensor]] = field(default_factory=dict)

    def of(self, layer: int) -> Tensor:
        """All masks of a layer, in the order of the inputs."""
        return torch.cat(self.masks[layer])


@contextmanager
def routed(model: nn.Module, router: Router | Sequence[Router], *, keep: int) -> Iterator[Choices]:
    """Run a model with only the heads that its router keeps, each input its own.

    >>> with us.routed(model, router, keep=6):  # doctest: +SKIP
    ...     logits = model(**batch).logits

    router: one, or one for each layer that is routed. keep: how many heads stay in each. The heads that go are gated
    to zero in the model's own forward; the model is as before afterwards. What was chosen is in the value of the
    `with`. It is an error if no forward ran.
    """
    routers = {one.card.layer: one for one in ([router] if isinstance(router, Router) else router)}
    if not routers:
        raise UnderstudyError("Give one router, or several for different layers.")
    bodies = [one.check_model(model) for one in routers.values()]
    for one in routers.values():
        one.check_budget(keep)
    if any(sum(part.block is bodies[0].layers[at].block for part in bodies[0].layers) > 1 for at in routers):
        raise UnderstudyError(
            f"{bodies[0].family.title} applies one block at several layers, which cannot be routed apart: use gates."
        )
    body, chosen = bodies[0], Choices({layer: [] for layer in routers})
    given: Batch = {}
    now: dict[int, Tensor] = {}

    def before_model(_model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given.clear()
        given.update(_tensors(body, args, kwargs))

    def before_block(layer: int) -> Any:
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            residual = args[0] if args else kwargs["hidden_states"]
            one = routers[layer]
            with torch.no_grad():
                z = summarize(residual, places(body, given, one.card.outcome, residual.shape[1]))
                now[layer] = one.choose(z, keep)
            chosen.masks[layer].append(now[layer].cpu())

        return hook

    def before_site(layer: int) -> Any:
        def hook(_site: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            gates = spread(now[layer].to(args[0]), body.layers[layer])  # [inputs, units · width]
            return (args[0] * gates[:, None], *args[1:])

        return hook

    handles = [body.model.register_forward_pre_hook(before_model, with_kwargs=True)]
    for layer in routers:
        part = body.layers[layer]
        handles.append(part.block.register_forward_pre_hook(before_block(layer), with_kwargs=True))
        handles.append(part.site.register_forward_pre_hook(before_site(layer), prepend=True))
    with eager(model), hooked(handles):
        yield chosen
    if not any(chosen.masks.values()):
        raise UnderstudyError("No forward of the model ran inside the `with`: run it there.")


def _tensors(body: Anatomy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """What a forward was called with, by name."""
    names = list(inspect.signature(type(body.model).forward).parameters)[1:]
    known = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in known.items() if isinstance(value, Tensor)}
