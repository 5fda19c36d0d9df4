"""How a router's network is fitted to anything: AdamW with a cosine, and the epoch that is best elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.meter import Progress
from understudy.routing.network import RouterNetwork


@dataclass(frozen=True)
class Descent:
    """The steps of a fit."""

    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float = 1e-2
    clip: float = 1.0  # of the gradient's length
    every: int = 1  # epochs between looks at inputs that are not fitted to


def descend(
    build: Callable[[], RouterNetwork],
    count: int,
    loss: Callable[[RouterNetwork, Tensor], Tensor],
    *,
    seed: int,
    by: Descent,
    score: Callable[[RouterNetwork], float] | None = None,
    progress: Progress | None = None,
) -> RouterNetwork:
    """Fit a network to `count` inputs by a loss of some of them; the same seed gives the same network.

    score: what is to be small on other inputs; the network of the epoch where it was smallest is returned. Without it,
    that of the last.
    """
    best: tuple[float, dict[str, Tensor]] | None = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build()
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=by.learning_rate, weight_decay=by.weight_decay, betas=(0.9, 0.98)
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, by.epochs * -(-count // by.batch))
        for epoch in range(by.epochs):
            network.train()
            for index in torch.split(torch.randperm(count), by.batch):
                optimizer.zero_grad()
                torch.autograd.backward(loss(network, index))
                torch.nn.utils.clip_grad_norm_(network.parameters(), by.clip)
                optimizer.step()
                schedule.step()
            if score is not None and (epoch + 1 == by.epochs or (epoch + 1) % by.every == 0):
                network.eval()
                with torch.no_grad():
                    found = score(network)
                if best is None or found < best[0]:
                    best = found, copy.deepcopy(network.state_dict())
            if progress is not None:
                progress(epoch + 1, by.epochs)
    if best is not None:
        network.load_state_dict(best[1])
    return network.eval()
