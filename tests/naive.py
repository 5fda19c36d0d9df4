"""CFS by its definition: one full forward for each intervention, float64 log-softmax, loops. The tests' truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[], Tensor]


def forward_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    arguments = {k: v for k, v in batch.items() if k not in ("positions", "labels")}
    with torch.no_grad():
        if not hasattr(model, "config"):
            return model(arguments["pixel_values"])
        return model(**arguments).logits


class gate_site:
    """Multiply unit u of the site of one layer, while inside. A shared site is told apart by counting its calls."""

    def __init__(self, sites: list[nn.Module], layer: int, heads: int, gates: Tensor) -> None:
        self.site, self.gates, self.heads = sites[layer], gates, heads
        self.turn = [i for i, s in enumerate(sites) if s is self.site].index(layer)
        self.calls = 0

    def __enter__(self) -> None:
        self.handle = self.site.register_forward_pre_hook(self.hook)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def hook(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        self.calls += 1
        if self.calls - 1 != self.turn:
            return None
        hidden = args[0]
        width = hidden.shape[-1] // self.heads
        parts = [hidden[..., u * width : (u + 1) * width] * float(self.gates[u]) for u in range(self.heads)]
        return (torch.cat(parts, -1), *args[1:])


def positions(batch: dict[str, Tensor], outcome: str) -> Tensor | None:
    if outcome == "classes":
        return None
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    if "positions" in batch:
        return mask & batch["positions"]
    if outcome == "last":
        last = torch.zeros_like(mask)
        for row in range(len(mask)):
            last[row, int(mask[row].nonzero().max())] = True
        return last
    return mask


def divergence(dense: Tensor, other: Tensor, where: Tensor | None) -> Tensor:
    log_p, log_q = dense.double().log_softmax(-1), other.double().log_softmax(-1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    if where is None:
        return each
    return torch.stack([each[row][where[row]].mean() for row in range(len(each))])


def cfs(
    model: Any, batch: dict[str, Tensor], sites: list[nn.Module], layer: int, heads: int, outcome: str, alphas: Tensor
) -> tuple[Tensor, Tensor]:
    """S [inputs, source, substitute] (NaN on the diagonal) and D_drop [inputs, source], whatever their size."""
    where = positions(batch, outcome)
    dense = forward_logits(model, batch)

    def run(gates: Tensor) -> Tensor:
        with gate_site(sites, layer, heads, gates):
            return divergence(dense, forward_logits(model, batch), where)

    count = len(dense)
    drop = torch.empty(count, heads, dtype=torch.float64)
    best = torch.full((count, heads, heads), torch.nan, dtype=torch.float64)
    for i in range(heads):
        gates = torch.ones(heads)
        gates[i] = 0
        drop[:, i] = run(gates)
        for j in range(heads):
            if j == i:
                continue
            found = [drop[:, i]]
            for alpha in alphas.tolist():
                gates = torch.ones(heads, dtype=torch.float64)
                gates[i], gates[j] = 0, alpha
                found.append(run(gates))
            best[:, i, j] = torch.stack(found).min(0).values
    return 1 - best / drop[:, :, None], drop
