"""A lesson: what a router is taught of some inputs, measured by intervention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from understudy.inputs.batch import Inputs
from understudy.lens.joint import gated_together
from understudy.lens.passes import opened
from understudy.lens.signals import signals
from understudy.lens.subsets import utility
from understudy.measurement import measure
from understudy.meter import Progress
from understudy.routing.network import Prediction
from understudy.routing.residual import places, summarize
from understudy.routing.subsets import listed

# Subsets that are ranked; of more, a sample.
POOL = 4096
# No input counts for less or more than this, in units of the mean damage.
STAKES = (0.02, 20.0)


@dataclass(frozen=True)
class Masks:
    """Retained subsets of each input, bool `[inputs, masks, units]`, and their KL when all else is removed together."""

    retained: Tensor
    kl: Tensor  # [inputs, masks]


@dataclass(frozen=True)
class Lesson:
    """Inputs with what a router sees of them and what it should say.

    z: summaries. S, alpha: of every pair, NaN where there is none. weight: `D_drop / Σ D_drop`. stake: the root of
    `Σ D_drop`, in units of its mean. taylor, norm, cosine: what other policies go by. masks: joint subsets for each
    budget, where they were run.
    """

    z: Tensor
    S: Tensor
    alpha: Tensor
    weight: Tensor
    stake: Tensor
    taylor: np.ndarray
    norm: np.ndarray
    cosine: np.ndarray
    masks: Mapping[int, Masks] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.z)

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.S.shape[-1]


def summaries(model: nn.Module, inputs: Inputs, *, layer: int, outcome: str = "auto") -> Tensor:
    """The summary of the residual before a layer, for every input: `[inputs, 3 · width]`."""
    parts = []
    with opened(model, inputs, layers=layer, outcome=outcome) as worker:
        (index,) = worker.protocol.layers
        for captured in worker.captures(range(len(inputs))):
            taken = captured.taken
            at = places(worker.body, taken.batch, worker.protocol.outcome, taken.tokens)
            parts.append(summarize(taken.sites[index].residual, at).cpu())
    return torch.cat(parts)


def lesson(
    model: nn.Module,
    inputs: Inputs,
    *,
    layer: int = -1,
    search: str = "refine",
    outcome: str = "auto",
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Lesson:
    """Measure what a router is taught about pairs. out: where the run is kept, and gone on with."""
    run = measure(model, inputs, layers=layer, search=search, outcome=outcome, out=out, progress=progress)
    seen = signals(model, inputs, layers=layer, outcome=outcome)
    drop = np.nan_to_num(run["drop"].to_numpy()[:, 0].astype(np.float64))
    total = drop.sum(-1)
    weight = drop / total[:, None].clip(min=1e-30)
    stake = np.sqrt((total / total.mean().clip(min=1e-30)).clip(*STAKES))
    return Lesson(
        z=summaries(model, inputs, layer=layer, outcome=outcome),
        S=torch.from_numpy(run["substitutability"].to_numpy()[:, 0]).float(),
        alpha=torch.from_numpy(run["compensation"].to_numpy()[:, 0]).float(),
        weight=torch.from_numpy(weight).float(),
        stake=torch.from_numpy(stake).float(),
        taylor=seen["taylor"].to_numpy()[:, 0],
        norm=seen["norm"].to_numpy()[:, 0],
        cosine=seen["cosine"].to_numpy()[:, 0],
    )


def joint_masks(
    model: nn.Module,
    inputs: Inputs,
    taught: Lesson,
    *,
    keep: Sequence[int],
    said: Prediction | None,
    layer: int = -1,
    outcome: str = "auto",
    count: int = 48,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[int, Masks]:
    """Run `count` subsets of each budget for each input, all other units removed together.

    Candidates: the best by measured CFS, by a router's own prediction, by Taylor, by size, and by dissimilarity; hard
    negatives, which CFS or the router rank just behind their best; and random ones.
    """
    masks = {size: candidates(taught, size, said=said, count=count, seed=seed) for size in keep}
    whole = np.concatenate([mask.numpy() for mask in masks.values()], axis=1)  # [inputs, masks of all budgets, units]
    kl = gated_together(model, inputs, whole, layer=layer, outcome=outcome, progress=progress)["kl"].to_numpy()
    found, start = {}, 0
    for size, mask in masks.items():
        found[size] = Masks(mask, torch.from_numpy(kl[:, start : start + mask.shape[1]]).float())
        start += mask.shape[1]
    return found


def candidates(taught: Lesson, keep: int, *, said: Prediction | None, count: int = 48, seed: int = 0) -> Tensor:
    """The subsets that a joint teacher runs: bool `[inputs, masks, units]`, no subset twice for an input.

    At most 20 go by scores. The others are random: without them a router is never told that a subset is bad which no
    score prefers, and then chooses it.
    """
    rng = np.random.default_rng((seed, keep))
    pool = subset_pool(taught.units, keep, seed=seed).numpy()  # [subsets, units]
    count = min(count, len(pool))
    weight = taught.weight.numpy()
    by_cfs = utility(taught.S.numpy(), weight, pool)
    ranks: list[tuple[np.ndarray, Sequence[int]]] = [(by_cfs, range(4))]
    if said is not None:
        by_router = utility(said.S.numpy(), said.share.numpy(), pool)
        ranks += [(by_router, range(4)), (by_router, _spread(8, 48, 3))]
    inside = pool.astype(np.float64)
    similar = np.einsum("mi,nij,mj->nm", inside, np.nan_to_num(taught.cosine), inside)
    ranks += [(taught.taylor @ inside.T, range(2)), (taught.norm @ inside.T, range(2)), (-similar, range(2))]
    ranks.append((by_cfs, _spread(8, 48, 3)))  # hard negatives: nearly as good by pairs, perhaps not together
    chosen = [
        np.argsort(-scores, axis=1, kind="stable")[:, [at for at in places if at < len(pool)]]
        for scores, places in ranks
    ]
    order = np.concatenate([*chosen, rng.permuted(np.tile(np.arange(len(pool)), (len(taught), 1)), axis=1)], axis=1)
    rows = np.stack([_first_different(row, count) for row in order])
    return torch.from_numpy(pool[rows])


def subset_pool(units: int, keep: int, *, seed: int = 0) -> Tensor:
    """All subsets of a size, or a sample where they are too many to be ranked: bool `[subsets, units]`."""
    if comb(units, keep) <= POOL:
        return listed(units, keep)
    rng = np.random.default_rng((seed, units, keep))
    scores = rng.random((2 * POOL, units))
    mask = scores <= np.sort(scores, axis=1)[:, keep - 1 : keep]
    found = np.unique(mask, axis=0)  # in order, so that the first of them would all lack the first units
    return torch.from_numpy(found[rng.permutation(len(found))[:POOL]])


def _spread(first: int, last: int, count: int) -> list[int]:
    return [int(at) for at in np.linspace(first, last - 1, count)]


def _first_different(row: np.ndarray, count: int) -> np.ndarray:
    """The first `count` values of a row that differ."""
    _, first = np.unique(row, return_index=True)
    return row[np.sort(first)[:count]]
