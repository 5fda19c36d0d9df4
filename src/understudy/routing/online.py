"""Routing while the model runs: its own forward keeps, for each input, the heads that a router chooses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy, anatomy
from understudy.errors import UnderstudyError
from understudy.gates import spread
from understudy.identity import fingerprint
from understudy.inputs.batch import Batch
from understudy.outcome import Outcome
from understudy.routing.builds import supported
from understudy.routing.compact import choosing, compacted, refuse_silent
from understudy.routing.residual import Places, places, summarize
from understudy.routing.router import Router
from understudy.surgery import eager, hooked

Mask = Callable[[Tensor], Tensor]  # from a block's input [inputs, tokens, width] to bool [inputs, units]


@dataclass
class Choices:
    """The masks that were chosen inside a `with routed(...)`, batch by batch: bool `[inputs, units]` by layer."""

    masks: dict[int, list[Tensor]] = field(default_factory=dict)
    execution: str = "gated"  # or "compact": what "auto" came to

    def of(self, layer: int) -> Tensor:
        """All masks of a layer, in the order of the inputs."""
        return torch.cat(self.masks[layer])


@contextmanager
def routed(
    model: nn.Module,
    router: Router | str | Path | Sequence[Router | str | Path],
    *,
    keep: int | Mapping[int, int],
    execution: str = "auto",
) -> Iterator[Choices]:
    """Run a model with only the heads that its router keeps, each input its own.

    >>> with us.routed(model, router, keep=6) as chosen:  # doctest: +SKIP
    ...     logits = model(**batch).logits
    >>> chosen.of(11)  # bool [inputs, units]  # doctest: +SKIP

    router: one, or one for each layer that is routed, or the folders that hold them; each looks at the residual stream
    as the routed layers before it have left it. keep: how many heads stay, in each layer or by layer. The model is as
    before afterwards. It is an error if no forward ran a routed layer.

    execution: the numbers are the same, and gradients flow, either way.

    - "compact": queries, keys, values, attention and projection are computed for the kept heads only. A key-value
      cache would miss the others and is refused: generate with `use_cache=False`.
    - "gated": the model's own attention computes all heads, and the others are set to zero before the projection. With
      a cache, each step of `generate` chooses by its new tokens alone.
    - "auto": "compact" where all routed layers can, else "gated".
    """
    body = anatomy(model)
    several = [router] if isinstance(router, Router | str | Path) else router
    routers = _by_layer(body, [one if isinstance(one, Router) else Router.load(one) for one in several])
    budgets = _budgets(body, routers, keep)
    way = _execution(body, routers, execution)
    chosen = Choices({layer: [] for layer in routers}, way)
    names = list(inspect.signature(type(body.base).forward).parameters)[1:]
    given: Batch = {}
    seen: dict[Outcome, Places] = {}  # the same for all layers of a forward

    def before_base(_base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        known = {**dict(zip(names, args, strict=False)), **kwargs}
        given.clear()
        given.update({name: value for name, value in known.items() if isinstance(value, Tensor)})
        seen.clear()

    def mask_of(layer: int) -> Mask:
        one = routers[layer]
        outcome = one.card.outcome

        @torch.no_grad()
        def choose(residual: Tensor) -> Tensor:
            if outcome not in seen:
                seen[outcome] = places(body, given, outcome, residual.shape[1])
            mask = one.choose(summarize(residual, seen[outcome]), budgets[layer])
            chosen.masks[layer].append(mask.cpu())
            return mask

        return choose

    masks = {layer: mask_of(layer) for layer in routers}
    run = (
        compacted(body, {at: _kept(choose) for at, choose in masks.items()})
        if way == "compact"
        else _gated(body, masks)
    )
    with hooked([body.base.register_forward_pre_hook(before_base, with_kwargs=True)]), run:
        yield chosen


def _kept(choose: Mask) -> Mask:
    """A choice as the numbers of the heads, `[inputs, K]`."""

    def kept(residual: Tensor) -> Tensor:
        mask = choose(residual)
        return mask.nonzero()[:, 1].view(len(mask), -1)

    return kept


@contextmanager
def _gated(body: Anatomy, masks: Mapping[int, Mask]) -> Iterator[nn.Module]:
    """Run a model with the units that are not chosen set to zero."""
    now: dict[int, Tensor] = {}
    ran: set[int] = set()

    def before_site(layer: int) -> Callable[..., tuple[Tensor, ...]]:
        def hook(_site: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            ran.add(layer)
            gates = spread(now[layer].to(args[0]), body.layers[layer])  # [inputs, units * width]
            return (args[0] * gates[:, None], *args[1:])

        return hook

    def hooks() -> Iterator[Any]:
        yield from choosing(body, masks, now)
        for layer in masks:
            yield body.layers[layer].site.register_forward_pre_hook(before_site(layer), prepend=True)

    with eager(body.model), hooked(hooks()):
        yield body.model
    refuse_silent(masks, ran)


def _by_layer(body: Anatomy, routers: Sequence[Router]) -> dict[int, Router]:
    """The routers by their layer, each checked against the model."""
    if not routers:
        raise UnderstudyError("Give one router, or several for different layers.")
    known = fingerprint(body)
    found: dict[int, Router] = {}
    for one in routers:
        layer = one.card.layer
        one.check_model(body, known=known)
        if layer in found:
            raise UnderstudyError(f"Two routers are for layer {layer}: give one for each layer.")
        if sum(part.block is body.layers[layer].block for part in body.layers) > 1:
            raise UnderstudyError(
                f"{body.family.title} applies one block at several layers, which cannot be routed apart: use gates "
                "(understudy.gated)."
            )
        found[layer] = one
    return found


def _budgets(body: Anatomy, routers: Mapping[int, Router], keep: int | Mapping[int, int]) -> dict[int, int]:
    """How many heads stay in each routed layer."""
    if isinstance(keep, Mapping):
        budgets = {body.layer_index(layer): count for layer, count in keep.items()}
        if set(budgets) != set(routers):
            there, told = (", ".join(map(str, sorted(layers))) or "none" for layers in (routers, budgets))
            raise UnderstudyError(f"Layer {there} is routed, but keep is given for layer {told}: give it for the same.")
    else:
        budgets = dict.fromkeys(routers, keep)
    for layer, one in routers.items():
        one.check_budget(budgets[layer])
    return budgets


def _execution(body: Anatomy, layers: Mapping[int, Router], execution: str) -> str:
    """How the heads are run."""
    if execution not in ("auto", "compact", "gated"):
        raise UnderstudyError(f"execution={execution!r} is not possible: say 'auto', 'compact' or 'gated'.")
    if execution != "auto":
        return execution
    return "compact" if all(supported(body, layer) for layer in layers) else "gated"
