"""capture: one dense forward of the user's own module, and what resuming it at a site needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch
from understudy.memory import is_out_of_memory
from understudy.surgery import hooked


class Stop(Exception):
    """Raised inside a forward when nothing later in it is needed."""


@dataclass
class SiteState:
    """A site on the dense forward. All tensors are `[inputs, tokens, ...]`."""

    residual: Tensor  # the block's input
    inner: Tensor  # the site's input, its last axis cut into units
    out: Tensor  # the site's output
    beside: Tensor | None = None  # what a parallel MLP added


@dataclass
class Capture:
    """A batch of inputs on the dense forward, from the first wanted site on."""

    count: int
    tokens: int
    batch: Batch
    sites: dict[int, SiteState] = field(default_factory=dict)
    # What each later block was called with beside its hidden states: masks, rotary tensors.
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    final: Tensor = field(default_factory=lambda: torch.empty(0))  # the last block's output

    def rows(self, value: Any, owner: Tensor) -> Any:
        """An argument of a block for rows that belong to the inputs `owner`.

        A tensor follows the rows only where its first dimension is the batch; one that all inputs share, such as a
        causal mask or rotary tables, stays as it is.
        """
        if isinstance(value, Tensor):
            follows = self.count > 1 and value.ndim > 1 and value.shape[0] == self.count
            return value[owner.to(value.device)] if follows else value
        if isinstance(value, tuple | list):
            return type(value)(self.rows(item, owner) for item in value)
        return value


def capture(body: Anatomy, batch: Batch, layers: Iterable[int]) -> Capture:
    """Run the model on a batch up to its last block, and keep what `layers` need.

    The forward ends after the last block: logits come from the final hidden states, a slice at a time.
    """
    wanted = set(layers)
    first, last = min(wanted), len(body.layers) - 1
    arguments, count = _arguments(body, batch)
    taken = Capture(count, 0, batch)
    layer = -1  # the application that runs now; a shared block's hooks fire once for each

    def before_block(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal layer
        layer += 1
        taken.tokens = args[0].shape[1]
        if layer >= first:
            taken.calls[layer] = (_without_cache(args[1:]), {key: _without_cache(v) for key, v in kwargs.items()})
        if layer in wanted:
            taken.sites[layer] = SiteState(args[0], torch.empty(0), torch.empty(0))

    def after_site(_site: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if layer in wanted:
            taken.sites[layer].inner, taken.sites[layer].out = args[0], output

    def after_beside(_beside: nn.Module, _args: Any, output: Any) -> None:
        if layer in wanted:
            taken.sites[layer].beside = output[0] if isinstance(output, tuple) else output

    def after_block(_block: nn.Module, _args: Any, output: Tensor) -> None:
        if layer == last:
            taken.final = output
            raise Stop

    def hooks() -> Iterator[Any]:
        for block in {layer.block for layer in body.layers}:
            # Before the user's own hooks on the block: these run again when the block does.
            yield block.register_forward_pre_hook(before_block, with_kwargs=True, prepend=True)
            yield block.register_forward_hook(after_block)
        for site in {layer.site for layer in body.sites}:
            yield site.register_forward_hook(after_site)
        for beside in {layer.beside for layer in body.sites if layer.beside is not None}:
            yield beside.register_forward_hook(after_beside)

    with hooked(hooks()), _fitting(body, arguments):
        body.run(arguments)
    return taken


def peek(body: Anatomy, batch: Batch, device: str | None = None) -> torch.Size:
    """The shape of the hidden states that the first block gets: inputs, tokens, width. No block runs."""
    seen: list[torch.Size] = []

    def before_block(_block: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].shape)
        raise Stop

    arguments, _ = _arguments(body, batch)
    if device is not None:
        arguments = {key: value.to(device) for key, value in arguments.items()}
    with (
        hooked([body.layers[0].block.register_forward_pre_hook(before_block, prepend=True)]),
        _fitting(body, arguments),
    ):
        body.run(arguments)
    return seen[0]


def _arguments(body: Anatomy, batch: Batch) -> tuple[Batch, int]:
    """What the forward takes of a batch, where the model is, and the number of inputs."""
    arguments = body.arguments(batch)
    main = "input_ids" if body.reads_text else "pixel_values"
    if main not in arguments:
        raise UnderstudyError(
            f"{type(body.model).__name__} takes {main}, but the batch has {', '.join(arguments) or 'nothing'}."
        )
    if "encoder_hidden_states" in arguments:
        raise UnderstudyError("The batch has encoder_hidden_states: models with cross-attention cannot be measured.")
    return arguments, len(arguments[main])


@contextmanager
def _fitting(body: Anatomy, arguments: Batch) -> Iterator[None]:
    try:
        yield
    except Stop:
        pass
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as problem:
        if is_out_of_memory(problem):
            raise
        shapes = ", ".join(f"{key} {list(value.shape[1:])}" for key, value in arguments.items())
        raise UnderstudyError(
            f"The inputs do not fit {type(body.model).__name__}: given {shapes} for each, it says: {problem}"
        ) from problem


def _without_cache(value: Any) -> Any:
    # Resumed rows must not append their keys to a cache that the forward had filled.
    if isinstance(value, tuple):
        return tuple(_without_cache(item) for item in value)
    return None if type(value).__name__.endswith("Cache") else value
