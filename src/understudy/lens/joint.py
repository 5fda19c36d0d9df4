"""The exact joint-subset oracle: every retained subset of a size, and other policies on the same budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor, nn

from understudy.divergence import kl
from understudy.errors import UnderstudyError
from understudy.identity import attributes
from understudy.lens.passes import Given, opened, walk
from understudy.lens.subsets import LIMIT, best_by_utility, count_subsets, largest, subsets
from understudy.meter import Meter, Progress
from understudy.organize.bootstrap import interval, value
from understudy.organize.pooled import Array
from understudy.resume import BUDGET, Suffix

ORACLE = "oracle"


def joint(
    model: nn.Module,
    inputs: Given,
    *,
    keep: int | Sequence[int],
    layer: int = -1,
    units: str = "heads",
    policies: Mapping[str, np.ndarray] | None = None,
    utilities: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
    masks: Mapping[str, Mapping[int, np.ndarray]] | None = None,
    oracle: bool = True,
    accuracy: bool = False,
    outcome: str = "auto",
    limit: int = LIMIT,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure every retained subset of each size at one layer, all others hard-gated together, and keep the best.

    >>> import understudy as us
    >>> from understudy.lens.joint import joint
    >>> found = joint(us.load("digits"), us.digits(4), keep=[3])
    >>> found.subset.sel(policy="oracle", keep=3).sum("unit").values
    array([3, 3, 3, 3])

    policies: scores of the units, `[inputs, units]`; each keeps its largest. utilities: S and weights of the sources,
    `[inputs, units, units]` and `[inputs, units]`; each keeps the set of largest pairwise utility, exactly. masks: what
    others chose, for each budget bool `[inputs, units]`. oracle: whether every subset is run, of which there may be too
    many. accuracy: refuse inputs without labels, where `correct` could not be said.

    | variable | dims | |
    |---|---|---|
    | `kl` | policy, keep, input | KL(dense ‖ the subset alone) |
    | `fidelity` | policy, keep, input | the share of distributions whose most likely class is the dense model's |
    | `correct` | policy, keep, input | whether it is the label; NaN without labels |
    | `subset` | policy, keep, input, unit | the units that were kept |
    | `dense_correct` | input | the same for the dense model |
    """
    sizes = _sizes(keep)
    scores = dict(policies or {})
    pairwise = dict(utilities or {})
    chosen_elsewhere = dict(masks or {})
    with opened(model, inputs, layers=layer, units=units, outcome=outcome, budget=budget) as worker:
        number = worker.body.sites[worker.protocol.layers[0]].units
        if not sizes:
            raise UnderstudyError(f"Give the budgets to keep, each from 1 to {number}.")
        names = [*([ORACLE] if oracle else []), *scores, *pairwise, *chosen_elsewhere]
        total = sum(count_subsets(number, size, limit) for size in sizes) if oracle else len(names) * len(sizes)
        _refuse_scores(scores, pairwise, len(worker.inputs), number)
        _refuse_masks(chosen_elsewhere, [*scores, *pairwise], sizes, (len(worker.inputs), number))
        if accuracy and "labels" not in worker.inputs.batch([0]):
            raise UnderstudyError(
                "Accuracy needs a label for each input, which these do not bring: add `labels` to the batch dict, or "
                "give them to images(...)."
            )
        chosen = {
            size: {
                **{name: largest(np.asarray(score), size) for name, score in scores.items()},
                **{name: best_by_utility(*given, size, limit=limit) for name, given in pairwise.items()},
                **{name: np.asarray(given[size]) for name, given in chosen_elsewhere.items()},
            }
            for size in sizes
        }
        meter = Meter(progress, total * len(worker.inputs))
        parts = []
        start = 0
        for captured, suffix in walk(worker):
            span = slice(start, start + captured.taken.count)
            start = span.stop
            labels = captured.taken.batch.get("labels") if worker.protocol.outcome == "classes" else None
            best = [
                {
                    **({ORACLE: _oracle(suffix, size, limit, meter)} if oracle else {}),
                    **{name: _one(suffix, mask[span]) for name, mask in chosen[size].items()},
                }
                for size in sizes
            ]
            dense = None if labels is None else suffix.predictions().cpu().numpy()
            parts.append(_Part(best, None if labels is None else labels.cpu().numpy(), dense))
        coords = {"policy": names, "keep": sizes, "input": list(worker.inputs.ids), "unit": np.arange(number)}
        known = attributes(worker.body, worker.inputs, worker.protocol, worker.dtype)
    return _dataset(parts, names, sizes, coords).assign_attrs({**known, "search": "every subset"})


def _sizes(keep: int | Sequence[int]) -> list[int]:
    given = [keep] if isinstance(keep, int) else list(keep)
    if any(not isinstance(size, int | np.integer) or isinstance(size, bool) for size in given):
        raise UnderstudyError(f"Budgets are whole numbers of units, but {given} was given.")
    return sorted({int(size) for size in given})


def _refuse_scores(
    scores: Mapping[str, np.ndarray], pairwise: Mapping[str, tuple[np.ndarray, np.ndarray]], inputs: int, units: int
) -> None:
    if ORACLE in {*scores, *pairwise} or set(scores) & set(pairwise):
        raise UnderstudyError(f"Policies need names of their own, and {ORACLE!r} is taken.")
    wanted: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    wanted |= {name: (np.shape(score), (inputs, units)) for name, score in scores.items()}
    wanted |= {name: (np.shape(weight), (inputs, units)) for name, (_, weight) in pairwise.items()}
    wanted |= {f"{name}, S": (np.shape(S), (inputs, units, units)) for name, (S, _) in pairwise.items()}
    for name, (shape, right) in wanted.items():
        if shape != right:
            raise UnderstudyError(
                f"The scores of {name!r} are {shape}, but {inputs} inputs of {units} units need {right}."
            )


def _refuse_masks(
    masks: Mapping[str, Mapping[int, np.ndarray]], taken: Sequence[str], sizes: Sequence[int], shape: tuple[int, int]
) -> None:
    if both := {ORACLE, *taken} & set(masks):
        raise UnderstudyError(f"Policies need names of their own, and {min(both)!r} is taken.")
    for name, given in masks.items():
        for size in sizes:
            mask = np.asarray(given.get(size, ()))
            if mask.shape != shape or mask.dtype != bool or (mask.sum(-1) != size).any():
                raise UnderstudyError(
                    f"The masks of {name!r} for a budget of {size} must be bool {shape} with {size} units kept of each "
                    f"input, but {mask.dtype} {mask.shape} was given."
                )


# What is kept of a row: its KL, whether the preferred class is the dense model's, and which it is.
def _numbers(logits: Tensor, dense: Tensor, p: Tensor) -> Tensor:
    best, before = logits.argmax(-1).double(), dense.argmax(-1).double()
    return torch.stack([kl(dense, p, logits), (best == before).double(), best], -1)


def _oracle(suffix: Suffix, size: int, limit: int, meter: Meter) -> tuple[np.ndarray, np.ndarray]:
    """The best subset of each input, and its numbers; subsets are streamed. NaN where none gives a number."""
    count, units = suffix.taken.count, suffix.layer.units
    numbers, masks = np.full((count, 3), np.nan), np.zeros((count, units), dtype=bool)
    for part in subsets(units, size, limit=limit):
        meter.expect(len(part) * count, len(part) * count)
        found = _run(suffix, np.broadcast_to(part, (count, *part.shape)), meter)
        known = np.where(np.isfinite(found[:, :, 0]), found[:, :, 0], np.inf)
        at = known.argmin(-1)
        least = known[np.arange(count), at]
        better = least < np.nan_to_num(numbers[:, 0], nan=np.inf)
        numbers[better], masks[better] = found[np.arange(count), at][better], part[at[better]]
        meter.close(len(part) * count)
    return numbers, masks


def gated_together(
    model: nn.Module,
    inputs: Given,
    gates: np.ndarray,
    *,
    layer: int = -1,
    units: str = "heads",
    outcome: str = "auto",
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure gates of one layer, all of a row at once: `gates` is `[inputs, rows, units]`, 0 removes, 1 leaves.

    `kl`, `fidelity` and `best`, the most likely class, have the dims input, row.
    """
    gates = np.asarray(gates)
    with opened(model, inputs, layers=layer, units=units, outcome=outcome, budget=budget) as worker:
        number = worker.body.sites[worker.protocol.layers[0]].units
        if gates.ndim != 3 or gates.shape[::2] != (len(worker.inputs), number):
            raise UnderstudyError(
                f"The gates are {gates.shape}, but {len(worker.inputs)} inputs of {number} units need "
                f"({len(worker.inputs)}, rows, {number})."
            )
        meter = Meter(progress, len(worker.inputs))
        parts = []
        start = 0
        for captured, suffix in walk(worker):
            parts.append(_run(suffix, gates[start : start + captured.taken.count]))
            start += captured.taken.count
            meter.close(captured.taken.count)
        ids = list(worker.inputs.ids)
    found = np.concatenate(parts)  # [inputs, rows, 3]
    dims = ("input", "row")
    variables = {name: (dims, found[..., at]) for at, name in enumerate(("kl", "fidelity", "best"))}
    return xr.Dataset(variables, {"input": ids})


def _one(suffix: Suffix, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of one retained subset for each input."""
    numbers = _run(suffix, masks[:, None])[:, 0]
    numbers[~np.isfinite(numbers[:, 0])] = np.nan
    return numbers, masks


def _run(suffix: Suffix, masks: np.ndarray, meter: Meter | None = None) -> np.ndarray:
    """The numbers of retained subsets `[inputs, subsets, units]`: `[inputs, subsets, 3]`."""
    count, each, units = masks.shape
    gates = torch.from_numpy(np.ascontiguousarray(masks.reshape(-1, units))).float()
    owner = torch.arange(count).repeat_interleave(each)
    found = suffix.resume(gates, owner, reduce=_numbers, advance=None if meter is None else meter.advance)
    return found.cpu().numpy().reshape(count, each, 3)


@dataclass(frozen=True)
class _Part:
    """A batch of inputs: for each budget the numbers and the subset of every policy; labels and dense predictions."""

    best: list[dict[str, tuple[np.ndarray, np.ndarray]]]
    labels: np.ndarray | None
    dense: np.ndarray | None


def _dataset(parts: list[_Part], names: list[str], sizes: list[int], coords: dict[str, object]) -> xr.Dataset:
    def stacked(which: int) -> np.ndarray:  # [policy, keep, input, ...]
        each = [[[part.best[at][name][which] for part in parts] for at in range(len(sizes))] for name in names]
        return np.stack([np.stack([np.concatenate(found) for found in budgets]) for budgets in each])

    numbers, masks = stacked(0), stacked(1)
    dims = ("policy", "keep", "input")
    labels = [part.labels for part in parts if part.labels is not None]
    right = numbers[..., 2] == np.concatenate(labels) if labels else None
    found = xr.Dataset({"kl": (dims, numbers[..., 0]), "fidelity": (dims, numbers[..., 1])}, coords)
    found["correct"] = (dims, np.full(numbers.shape[:3], np.nan) if right is None else right.astype(float))
    found["subset"] = ((*dims, "unit"), masks)
    if labels:
        dense = np.concatenate([part.dense for part in parts if part.dense is not None])
        found["dense_correct"] = (("input",), (dense == np.concatenate(labels)).astype(float))
    return found


def joint_table(
    found: xr.Dataset, *, against: str = "taylor", confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Return mean KL, accuracy and fidelity of every policy and budget, and paired differences with intervals.

    `kl_gap`, `fidelity_gap`: the policy minus `against` on the same inputs, with `_low` and `_high` from resampled
    inputs: the paper's Table 2 and appendix D.
    """
    if against not in found["policy"].values:
        raise UnderstudyError(f"Policy {against!r} is not there: there are {', '.join(found['policy'].values)}.")
    rows = {}
    for size in found["keep"].values:
        # Paired: the inputs on which every policy gave a number.
        here = found.sel(keep=size)
        here = here.isel(input=np.isfinite(here["kl"].values).all(0))
        for name in found["policy"].values:
            one = here.sel(policy=name)
            row = {column: float(one[column].mean()) for column in ("kl", "correct", "fidelity") if column in one}
            for column in ("kl", "fidelity"):
                gap = (one[column] - here[column].sel(policy=against)).values

                def statistic(draws: Array, gap: Array = gap) -> Array:
                    return np.asarray(draws @ gap / draws.sum(-1))

                low, high = interval(statistic, len(gap), confidence=confidence, resamples=resamples, seed=seed)
                row |= {f"{column}_gap": float(value(statistic, len(gap)))}
                row |= {f"{column}_gap_low": float(low), f"{column}_gap_high": float(high)}
            row["left_out"] = found.sizes["input"] - here.sizes["input"]
            rows[int(size), str(name)] = row
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(list(rows), names=["keep", "policy"])
    table.attrs = {"against": against}
    return table
