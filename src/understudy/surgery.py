"""Changes to a model that last for one `with`: whatever happens inside, the model is as before after it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_ABSENT = object()


# Settings of a config, and of modules, that would change what a forward returns or how it cuts its tokens.
_CONFIG = {"return_dict": True, "output_hidden_states": False, "_output_attentions": False}
_MODULE = {"chunk_size_feed_forward": 0}


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, nothing compiled, cast or recorded. One thread at a time."""
    training = [module for module in model.modules() if module.training]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "to_dict")}
    settings: list[tuple[object, str, Any]] = []
    settings += [(c, name, value) for c in configs.values() for name, value in _CONFIG.items() if name in vars(c)]
    settings += [(m, name, value) for m in model.modules() for name, value in _MODULE.items() if name in vars(m)]
    learning = [p for p in model.parameters() if p.requires_grad]
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    model.eval()
    try:
        for parameter in learning:  # a backward is only ever taken for a site's output
            parameter.requires_grad_(False)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
            eager(model),
            replaced(settings),
        ):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


def eager(model: nn.Module) -> AbstractContextManager[Any]:
    """Nothing compiled, where something is."""
    # A compiled graph would not see replaced forwards. The stance is asked for only where something is
    # compiled, because it imports the compiler.
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


@contextmanager
def replaced(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Replace attributes of objects, such as `forward`: (owner, name, value) each.

    Only the instance's own dictionary is touched, and it is restored entry by entry, so a `forward`
    that accelerate had put there comes back.
    """
    before: list[tuple[object, str, Any]] = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            vars(owner)[name] = value
        yield
    finally:
        for owner, name, original in reversed(before):
            if original is _ABSENT:
                del vars(owner)[name]
            else:
                vars(owner)[name] = original


def answering(module: nn.Module, forward: Callable[..., Any]) -> list[tuple[object, str, Any]]:
    """Changes for `replaced`: a module that only answers, without its own hooks.

    What the answer holds was captured after the user's hooks had run; they must not run on it again.
    """
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [(module, "forward", forward), *((module, name, OrderedDict()) for name in hooks)]


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
