"""A trajectory: runs of one model at many steps of its training, and how far each is from the last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from understudy.errors import UnderstudyError
from understudy.lens.conditioning import agreement, best_substitute, pearson
from understudy.lens.proxies import within_source
from understudy.organize.organization import measured, substitutability
from understudy.organize.pooled import Array
from understudy.organize.summary import summary

TAUS = (0.25, 0.5, 0.75)
# Deletion effects below this many thresholds say little: the source is barely valid.
BARELY = 10

# What two runs of a trajectory have in common.
_SHARED = ("inputs_hash", "units", "search", "outcome", "threshold")


def trajectory(runs: Sequence[xr.Dataset], *, taus: Sequence[float] = TAUS) -> xr.Dataset:
    """Return how the organization of a model forms, from its runs in the order of their `step` attributes.

    | variable | dims | |
    |---|---|---|
    | `graph` | step, layer, source, substitute | S, mean over the inputs on which the source is valid |
    | `similarity`, `similarity_pearson` | step, layer | correlation of the mean graph with the last; of ranks, or not |
    | `similarity_halves` | half, step, layer | the same of every other input alone: what both show is no chance |
    | `agreement` | step, layer | share of sources with the same best substitute in the mean graph as at last |
    | `ranking` | step, layer, source | rank correlation of a source's substitutes with the last ones |
    | `similarity_inputs`, `agreement_inputs` | step, layer | the same for each input's own graph, mean over inputs |
    | `raw`, `matched`, `rank`, `coverage` | step, layer (, tau) | as in `summary` |
    | `valid` | step, layer | share of valid source-input pairs |
    | `drop` | step, layer, source | mean deletion effect, over all inputs |
    | `warmup` | step, layer | the median deletion effect is below ten thresholds: what S says there is little |
    | `metric` | step | the task metric, where the runs have one |

    Every run has the attribute `step`, and may have `epoch`, `metric` and `metric_name`.
    """
    if not runs:
        raise UnderstudyError("A trajectory needs runs, but none were given.")
    ordered = sorted(runs, key=lambda run: int(run.attrs["step"]))
    _check_shared(ordered)
    last = ordered[-1]
    parts = [_at_step(run, last, taus) for run in ordered]
    steps = [int(run.attrs["step"]) for run in ordered]
    whole = xr.concat(parts, xr.DataArray(steps, dims="step", name="step"))
    if all("epoch" in run.attrs for run in ordered):
        whole = whole.assign_coords(epoch=("step", [float(run.attrs["epoch"]) for run in ordered]))
    if any("metric" in run.attrs for run in ordered):
        whole["metric"] = ("step", [float(run.attrs.get("metric", np.nan)) for run in ordered])
    kept = {key: last.attrs[key] for key in ("model", "model_class", *_SHARED) if key in last.attrs}
    return whole.assign_attrs(kept, metric=str(last.attrs.get("metric_name", "")), final=steps[-1])


def similarity(run: xr.Dataset, other: xr.Dataset) -> Array:
    """The rank correlation of two mean graphs over all pairs, for each layer."""
    a, b = (mean_graph(each) for each in (run, other))
    return within_source(a.reshape(len(a), -1), b.reshape(len(b), -1))


def mean_graph(run: xr.Dataset) -> Array:
    """S, mean over the inputs on which a source is valid: `[layer, source, substitute]`."""
    (run,) = measured(run)
    S = substitutability(run).to_numpy().astype(np.float64)
    known = np.isfinite(S)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(known, S, 0).sum(0) / known.sum(0)
    return mean


def _at_step(run: xr.Dataset, last: xr.Dataset, taus: Sequence[float]) -> xr.Dataset:
    graph, final = mean_graph(run), mean_graph(last)
    flat = [each.reshape(len(each), -1) for each in (graph, final)]
    best = [best_substitute(each) for each in (graph, final)]
    both = (best[0] >= 0) & (best[1] >= 0)
    own = agreement(run, last)
    table = summary(run, taus=taus, resamples=0).iloc[:-1]  # without "all"
    drop = run["drop"].transpose("input", "layer", "source").to_numpy()
    with np.errstate(invalid="ignore"):
        agreed = ((best[0] == best[1]) & both).sum(-1) / both.sum(-1)
        effect = np.nanmedian(drop, axis=(0, 2)) / float(run.attrs["threshold"])
    layer, source = ("layer",), ("layer", "source")
    covers = table[[f"cover{100 * tau:g}" for tau in taus]].to_numpy(dtype=np.float64)
    variables = {
        "graph": (("layer", "source", "substitute"), graph),
        "similarity": (layer, within_source(*flat)),
        "similarity_pearson": (layer, pearson(*flat)),
        "similarity_halves": (("half", "layer"), np.stack([_of_half(run, last, half) for half in (0, 1)])),
        "similarity_inputs": (layer, own["spearman"].mean("input").to_numpy()),
        "agreement": (layer, agreed),
        "agreement_inputs": (layer, own["best"].mean("input").to_numpy()),
        "ranking": (source, within_source(graph, final)),
        **{name: (layer, table[name].to_numpy(dtype=np.float64)) for name in ("raw", "rank", "valid")},
        "matched": (layer, table["matched2"].to_numpy(dtype=np.float64)),
        "coverage": (("layer", "tau"), covers),
        "drop": (source, np.nanmean(drop, axis=0)),
        "warmup": (layer, effect < BARELY),
    }
    number = np.arange(graph.shape[-1])
    coords = {"layer": run["layer"].to_numpy(), "source": number, "substitute": number, "tau": list(taus)}
    return xr.Dataset(variables, coords)


def _of_half(run: xr.Dataset, last: xr.Dataset, half: int) -> Array:
    every = slice(half, None, 2)
    if run.sizes["input"] < 2:
        return np.full(run.sizes["layer"], np.nan)
    return similarity(run.isel(input=every), last.isel(input=every))


def _check_shared(runs: Sequence[xr.Dataset]) -> None:
    first, steps = runs[0], [int(run.attrs["step"]) for run in runs]
    if len(set(steps)) != len(steps):
        raise UnderstudyError(f"A trajectory has one run a step, but the steps are {steps}.")
    for run in runs:
        substitutability(run)
        here, there = ([*map(int, each["layer"].to_numpy())] for each in (first, run))
        if run.sizes["source"] != first.sizes["source"] or here != there:
            raise UnderstudyError(
                f"The runs of a trajectory are of one architecture, but step {run.attrs['step']} has "
                f"{run.sizes['source']} heads at layers {there}, and step {first.attrs['step']} "
                f"{first.sizes['source']} at {here}."
            )
        for key in _SHARED:
            if run.attrs.get(key) != first.attrs.get(key):
                what = "another probe set" if key == "inputs_hash" else f"another {key}"
                raise UnderstudyError(
                    f"The runs of a trajectory are measured alike, but step {run.attrs['step']} has {what} than step "
                    f"{first.attrs['step']}: measure them again on the same inputs."
                )
