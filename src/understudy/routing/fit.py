"""Fitting a router's network to lessons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.meter import Progress
from understudy.routing import losses
from understudy.routing.descent import Descent, descend
from understudy.routing.lesson import Lesson, subset_pool
from understudy.routing.network import Prediction, RouterNetwork


@dataclass(frozen=True)
class Settings(Descent):
    """How a router is fitted. The paper gives the terms of the loss and no weights: these are ours."""

    epochs: int = 16
    batch: int = 64
    learning_rate: float = 1.5e-3
    clip: float = 5.0
    every: int = 2
    ranking: float = 1.0
    regression: float = 1.0
    source_weight: float = 0.5
    compensation: float = 0.25
    structured: float = 0.3
    joint: float = 1.0
    regret: float = 3.0
    subsets: int = 64  # of all subsets, drawn anew for each step of the structured loss


def fit(
    taught: Lesson,
    *,
    keep: Sequence[int],
    seed: int,
    settings: Settings | None = None,
    score: Callable[[RouterNetwork], float] | None = None,
    progress: Progress | None = None,
) -> RouterNetwork:
    """Fit a network to a lesson; with joint masks in it this is R2, else R1. The same seed gives the same network.

    score: what is to be small on inputs that are not in the lesson, such as the KL of the chosen subsets; the network
    of the epoch where it was smallest is returned. Without it, that of the last.
    """
    chosen = settings or Settings()

    def build() -> RouterNetwork:
        network = RouterNetwork(taught.z.shape[1], taught.units)
        network.mean.copy_(taught.z.mean(0))
        network.scale.copy_(taught.z.std(0).clamp(min=1e-6))
        return network

    def loss(network: RouterNetwork, index: Tensor) -> Tensor:
        return _loss(network(taught.z[index]), taught, index, keep, chosen)

    return descend(build, len(taught), loss, seed=seed, by=chosen, score=score, progress=progress)


def _loss(said: Prediction, taught: Lesson, index: Tensor, keep: Sequence[int], by: Settings) -> Tensor:
    S, alpha, weight, stake = taught.S[index], taught.alpha[index], taught.weight[index], taught.stake[index]
    total = by.ranking * losses.ranking(said.S, S, stake) + by.regression * losses.regression(said.S, S, stake)
    total = total + by.source_weight * losses.source_weight(said.weight, weight, stake)
    total = total + by.compensation * losses.compensation(said.alpha, alpha, S, stake)
    for size in keep:
        pool = subset_pool(taught.units, size)
        some = pool[torch.randperm(len(pool))[: by.subsets]]
        total = total + by.structured / len(keep) * losses.structured(said, S, weight, some, stake)
        if size in taught.masks:
            masks, kl = taught.masks[size].retained[index], taught.masks[size].kl[index]
            total = total + by.joint / len(keep) * losses.joint(said, masks, kl)
            total = total + by.regret / len(keep) * losses.regret(said, masks, kl)
    return total
