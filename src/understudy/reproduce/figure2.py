"""Figure 2 and appendix A: how functional organization forms during training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from torch import nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.inputs.images import images
from understudy.inputs.pictures import labelled_pictures
from understudy.inputs.texts import texts
from understudy.recipes.digits import DIGITS
from understudy.recipes.vit import VitRecipe
from understudy.report import depth_figure, formation, graph_figure, trajectory_figure
from understudy.reproduce.many import ManySetting, ManyStudy, spread_of
from understudy.reproduce.pictures import MINI
from understudy.reproduce.study import Finding, Report
from understudy.scaling.checkpoints import measure_checkpoints
from understudy.scaling.contrast import Contrast, over_seeds
from understudy.scaling.divide import divided
from understudy.scaling.dynamics import Watched
from understudy.scaling.trajectory import trajectory
from understudy.worker import Layers

# Similarity with the last graph, by the share of the training that is done and the place of the layer.
PAPER = {(0.25, 2): 0.612, (0.5, 2): 0.242, (0.75, 2): 0.787, (0.75, 0): 0.839, (0.75, 1): 0.429}
SHARES = (0.25, 0.5, 0.75, 1.0)
# Differences of a correlation below this are called none.
SMALL = 0.1
# A graph whose correlation with the last one is below this is still unlike it.
ALIKE = 0.9


@dataclass(frozen=True)
class Plan:
    """What is trained, and how it is looked at."""

    recipe: VitRecipe
    layers: Layers
    search: str
    probe: int  # held-out pictures
    epochs: tuple[int, ...]  # that are measured

    def watched(self, seed: int) -> Watched:
        """The training of a seed."""
        unseen = self.recipe.data.held_out
        probe = unseen.take(range(min(self.probe, len(unseen))))
        return Watched(self.recipe, seed, probe, self.epochs, self.layers, self.search, unseen)


def run(setting: ManySetting) -> Report:
    """A training for each seed under a probe, or checkpoints that were saved; the figures are of the first."""
    _refuse_idle(setting)
    if setting.checkpoints is not None:
        every, said = [_of_checkpoints(setting)], f"checkpoints of {setting.checkpoints.name}"
    else:
        plan = _plan(setting)
        watched = [plan.watched(seed) for seed in range(setting.seeds)]
        models = setting.folder / "models"
        work = {one.name: partial(_trajectory, one, models, setting) for one in watched}
        every = list(divided(work, setting.folder / "runs").values())
        inputs = f"{len(watched[0].inputs)} held-out pictures"
        said = f"{inputs}, layers {plan.layers}, search {plan.search}; {plan.recipe.summary}"
    first = every[0]
    steps = [int(first["step"][_at(first, share)]) for share in (0.0, *SHARES)]
    drawn = {"formation": formation(first), "trajectory": trajectory_figure(first), "depth": depth_figure(first)}
    drawn["graphs"] = graph_figure(first, steps=list(dict.fromkeys(steps)))
    about = {"protocol": said, "spread": spread_of(len(every)), "figures": "of the first seed's training"}
    data = {f"trajectory-seed{at}": found for at, found in enumerate(every)}
    return Report({"formation": _table(every)}, _findings(every), data, about, {"steps": _steps(every)}, drawn)


def _trajectory(watched: Watched, models: Path, setting: ManySetting) -> xr.Dataset:
    return watched.trajectory(models, setting.bar(f"training seed {watched.seed}"))


def _refuse_idle(setting: ManySetting) -> None:
    """Some options say something only to checkpoints, others only to a training."""
    only = {"texts": setting.texts, "labels": setting.labels, "engine": None if setting.engine == "local" else 1}
    if setting.checkpoints is None and (idle := [name for name, value in only.items() if value is not None]):
        raise UnderstudyError(f"--{idle[0]} is for --checkpoints: a training here has pictures and labels of its own.")
    if setting.checkpoints is not None and setting.seeds > 1:
        raise UnderstudyError("--seeds is for trainings: checkpoints are of one.")


def _plan(setting: ManySetting) -> Plan:
    if setting.scale == "paper":
        if setting.images is None:
            raise UnderstudyError("figure2 at paper scale trains on ImageNet-100: give its folder with --images.")
        data = labelled_pictures(setting.images, side=224)
        # ViT-S; of AugReg's augmentation, flips and moves.
        shape: dict[str, Any] = {"heads": 6, "head_width": 64, "layers": 12, "mlp_ratio": 4, "patch": 16, "init": 0.02}
        taught: dict[str, Any] = {
            "epochs": 100,
            "batch": 256,
            "learning_rate": 1e-3,
            "warmup": 2000,
            "weight_decay": 0.1,
        }
        recipe = VitRecipe(f"vit-s-{data.name}", data, **shape, **taught, shift=16.0, flip=True, by_index=True)
        epochs = (1, 2, 3, *range(5, 101, 5))
        return Plan(recipe, [3, 7, 11], "grid:16", setting.count or 512, epochs)
    recipe = MINI.one(DIGITS.data if setting.images is None else labelled_pictures(setting.images, side=MINI.side))
    whole = recipe.epochs
    epochs = tuple(sorted({0, 1, 2, 3, *(round(whole * share / 20) for share in range(1, 21))}))
    return Plan(recipe, "quarters", "refine", setting.count or 128, epochs)


def _of_checkpoints(setting: ManySetting) -> xr.Dataset:
    assert setting.checkpoints is not None
    if (setting.images is None) == (setting.texts is None):
        raise UnderstudyError("Checkpoints are measured on a probe set: give --images or --texts.")

    def inputs(model: nn.Module) -> Inputs:
        if setting.images is not None:
            return images(setting.images, model, count=setting.count, labels=setting.labels)
        assert setting.texts is not None
        return texts(setting.texts, model, count=setting.count)

    whole = setting.checkpoints.resolve()
    mark = hashlib.sha256(str(whole).encode()).hexdigest()[:8]
    out = setting.folder / "runs" / f"checkpoints-{whole.name}-{mark}"
    known = setting.texts is not None or setting.labels is not None
    runs = measure_checkpoints(
        setting.checkpoints,
        inputs,
        out=out,
        scored=inputs if known else None,
        engine=setting.engine,
        bar=setting.bar,
    )
    return trajectory(runs)


def _at(found: xr.Dataset, share: float) -> int:
    """The measured step nearest to a share of the training."""
    steps = found["step"].to_numpy()
    return int(np.abs(steps - share * steps[-1]).argmin())


def _table(every: list[xr.Dataset]) -> pd.DataFrame:
    """Every layer after each quarter of the training, mean over seeds."""
    rows = {}
    for share in SHARES:
        for place, layer in enumerate(every[0]["layer"].to_numpy()):
            here = [found.isel(step=_at(found, share), layer=place) for found in every]
            row = {name: [float(one[name]) for one in here] for name in ("similarity", "agreement", "raw", "rank")}
            row["cover"] = [float(one["coverage"].sel(tau=0.5)) for one in here]
            row["drop"] = [float(one["drop"].mean()) for one in here]
            if "metric" in every[0]:
                row[every[0].attrs["metric"]] = [float(one["metric"]) for one in here]
            figures: dict[str, float] = {}
            for name, values in row.items():
                figures[name] = float(np.mean(values))
                if name == "similarity":
                    figures["similarity_paper"] = PAPER.get((share, place), np.nan)
                if len(every) > 1:
                    figures |= {f"{name}_low": min(values), f"{name}_high": max(values)}
            rows[f"{share:.0%}", int(layer)] = figures
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["trained", "layer"])


def _steps(every: list[xr.Dataset]) -> pd.DataFrame:
    """Every measured step of every layer and seed."""
    names = ("similarity", "similarity_inputs", "agreement", "agreement_inputs", "raw", "matched", "rank", "valid")
    frames = []
    for seed, found in enumerate(every):
        frame = found[[*names, "warmup"]].to_dataframe().assign(seed=seed)
        frame["drop"] = found["drop"].mean("source").to_series()
        frames.append(frame.set_index("seed", append=True))
    return pd.concat(frames)


def early_and_late(found: xr.Dataset, place: int) -> float:
    """How much nearer to the last graph a layer is in the second half than in the first quarter, warm-up left out."""
    similar = found["similarity"].where(~found["warmup"]).isel(layer=place).to_numpy()
    early, late = similar[: _at(found, 0.25)], similar[_at(found, 0.5) : -1]
    if not (np.isfinite(early).any() and np.isfinite(late).any()):
        return float("nan")
    return float(np.nanmean(late) - np.nanmean(early))


def largest_fall(found: xr.Dataset) -> float:
    """The largest fall of similarity between two measurements: found on one half of the inputs, read off the other."""
    settled = found["similarity_halves"].isel(step=slice(_at(found, 0.1), None))
    falls = -settled.diff("step").transpose("half", "step", "layer").to_numpy()
    return _told_by_the_other_half(falls)


def range_of_layers(found: xr.Dataset) -> float:
    """How far apart two layers are after three quarters: found on one half of the inputs, read off the other."""
    here = found["similarity_halves"].isel(step=_at(found, 0.75)).transpose("half", "layer").to_numpy()
    return _told_by_the_other_half(here[:, :, None] - here[:, None, :])


def _told_by_the_other_half(values: np.ndarray) -> float:
    """The value of each half where the other's is largest, mean of both: a maximum alone is always above the truth."""
    a, b = values.reshape(2, -1)
    if not (np.isfinite(a).any() and np.isfinite(b).any()):
        return float("nan")
    return float((b[np.nanargmax(a)] + a[np.nanargmax(b)]) / 2)


def unlike_when_good(found: xr.Dataset) -> float:
    """How far mean similarity is below `ALIKE` where the metric has made 95% of its way for good."""
    metric = found["metric"].to_numpy()
    way = metric[-1] - metric[0]
    if not np.isfinite(metric).all() or way == 0:
        return float("nan")
    there = (metric - metric[0]) / way >= 0.95
    first = len(there) - int(np.logical_and.accumulate(there[::-1]).sum())
    return ALIKE - float(found["similarity"].isel(step=first).mean())


def growth(found: xr.Dataset) -> float:
    """By how many orders of magnitude the mean deletion effect has grown."""
    effect = found["drop"].mean(("layer", "source"))
    return float(np.log10(effect.isel(step=-1) / effect.isel(step=0)))


def _findings(every: list[xr.Dataset]) -> tuple[Finding, ...]:
    layers = [int(layer) for layer in every[0]["layer"].to_numpy()]

    def contrast(of: Callable[[xr.Dataset], float], less: float = 0.0) -> Contrast:
        return over_seeds([of(found) - less for found in every])

    findings = [
        Finding.beyond_spread(
            "Organization forms gradually: after the warm-up, the graph is nearer to the last one late than early, at "
            "every layer",
            {f"layer {layer}": contrast(partial(early_and_late, place=at)) for at, layer in enumerate(layers)},
        ),
        Finding.beyond_spread(
            f"But not steadily: from one measurement to the next, similarity falls by more than {SMALL:g} somewhere",
            {"beyond that by": contrast(largest_fall, SMALL)},
        ),
        Finding.beyond_spread(
            f"Layers settle at different rates: after three quarters their similarities differ by more than {SMALL:g}",
            {"beyond that by": contrast(range_of_layers, SMALL)},
        ),
        Finding.beyond_spread(
            "Early deletion effects are small: they grow at least tenfold",
            {"orders of magnitude beyond one": contrast(growth, 1.0)},
        ),
    ]
    if "metric" in every[0]:
        claim = (
            f"Performance and organization are not in step: with 95% of the {every[0].attrs['metric']} gained, the "
            f"graphs are still unlike the last ones (mean similarity below {ALIKE:g})"
        )
        findings.append(Finding.beyond_spread(claim, {"below by": contrast(unlike_when_good)}))
    return tuple(findings)


STUDY = ManyStudy(
    "figure2",
    "Formation and stabilization during training (section 5.4, Figure 2, appendix A)",
    {
        "mini": ("seeds", "images", "checkpoints", "labels", "texts", "count", "engine"),
        "paper": ("seeds", "images", "count"),
    },
    {
        "mini": "the digits recipe (or the same on --images), 23 measurements of 128 held-out digits at three layers; "
        "about four minutes a seed. It can be interrupted and goes on. With --checkpoints, a training of yours",
        "paper": "a ViT-S trained for 100 epochs on ImageNet-100 in a folder (--images), 512 held-out pictures at "
        "layers 3, 7 and 11; accelerators",
    },
    run,
)
