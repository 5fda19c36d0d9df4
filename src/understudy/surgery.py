"""Changes to a model that last for one `with`: whatever happens inside, the model is as before after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_ABSENT = object()


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, nothing compiled."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), _eager(model):
            yield
    finally:
        for module in training:
            module.training = True


def _eager(model: nn.Module) -> AbstractContextManager[Any]:
    # A compiled graph would not see replaced forwards. The stance is asked for only where something is
    # compiled, because it imports the compiler.
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


@contextmanager
def replaced(changes: Iterable[tuple[object, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace methods of objects: (owner, name, function) each.

    Only the instance's own dictionary is touched, and it is restored entry by entry, so a `forward`
    that accelerate had put there comes back.
    """
    before: list[tuple[object, str, Any]] = []
    try:
        for owner, name, function in changes:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            vars(owner)[name] = function
        yield
    finally:
        for owner, name, original in reversed(before):
            if original is _ABSENT:
                del vars(owner)[name]
            else:
                vars(owner)[name] = original


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end."""
    kept: list[RemovableHandle] = []
    try:
        kept.extend(handles)
        yield
    finally:
        for handle in kept:
            handle.remove()


@contextmanager
def swapped(values: dict[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Let parameters point to other tensors; the originals are kept and come back untouched."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, original in before.items():
            parameter.data = original
