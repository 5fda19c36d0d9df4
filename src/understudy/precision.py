"""In which precision the suffix runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from understudy.anatomy import Anatomy
from understudy.errors import UnderstudyError
from understudy.surgery import swapped

HALF = (torch.float16, torch.bfloat16)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """The floating-point type of the suffix, and the weights it needs in that type.

    A half-precision model is captured as it is and resumed in float32 where memory allows: in bfloat16 a true D of
    1.5e-5 reads 3.5e-4. The cast is exact, and the model's own weights come back untouched.
    """

    def __init__(self, body: Anatomy, dtype: str | torch.dtype | None, first: int) -> None:
        self.dtype = _resolve(body, dtype)
        before = {p for layer in body.layers[:first] for p in layer.block.parameters()}
        after = {p for layer in body.layers[first:] for p in layer.block.parameters()}
        wanted = [p for p in body.model.parameters() if p not in before or p in after]  # a shared block is both
        self._parameters = [p for p in wanted if p.is_floating_point() and p.dtype != self.dtype]
        if any(p.device.type == "meta" for p in self._parameters) and dtype is not None:
            raise UnderstudyError(
                f"dtype={str(dtype)!r} cannot be used with offloaded weights, which are not here to be cast."
            )
        if dtype is None and not _fits(self._parameters, self.dtype):
            self.dtype, self._parameters = body.dtype, []
        self._cast: dict[nn.Parameter, torch.Tensor] | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with its suffix in this precision; cast once, swapped in each time."""
        if self._cast is None:
            self._cast = {p: p.detach().to(self.dtype) for p in self._parameters}
        with swapped(self._cast):
            yield


def _resolve(body: Anatomy, dtype: str | torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.float32 if body.dtype in HALF else body.dtype
    value = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if value is None or value not in DTYPES.values():
        raise UnderstudyError(f"dtype {dtype!r} is not possible: choose one of {', '.join(DTYPES)}, or None.")
    return value


def _fits(parameters: list[nn.Parameter], dtype: torch.dtype) -> bool:
    if any(p.device.type == "meta" for p in parameters):  # offloaded: not here to be cast
        return False
    needed = sum(p.numel() for p in parameters) * dtype.itemsize
    if not parameters or parameters[0].device.type == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    elif parameters[0].device.type == "cuda":
        free = torch.cuda.mem_get_info(parameters[0].device)[0]
    else:
        return False
    return needed <= free // 2
