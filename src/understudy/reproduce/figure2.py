"""Figure 2 and appendix A: how functional organization forms during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

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
from understudy.reproduce.many import ManySetting, ManyStudy
from understudy.reproduce.pictures import MINI
from understudy.reproduce.study import Finding, Report
from understudy.scaling.checkpoints import measure_checkpoints
from understudy.scaling.contrast import Contrast, over_seeds
from understudy.scaling.divide import divided
from understudy.scaling.dynamics import dynamics
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


def run(setting: ManySetting) -> Report:
    """A training for each seed under a probe, or checkpoints that were saved; the figures are of the first."""
    if setting.checkpoints is not None:
        every, said = [_of_checkpoints(setting)], f"checkpoints of {setting.checkpoints.name}"
    else:
        plan = _plan(setting)
        work = {f"figure2-seed{seed}": partial(_trained, plan, setting, seed) for seed in range(setting.seeds)}
        every = list(divided(work, setting.folder / "runs").values())
        said = f"{plan.probe} held-out pictures, layers {plan.layers}, search {plan.search}, {plan.recipe.summary}"
    first = every[0]
    drawn = {"formation": formation(first), "trajectory": trajectory_figure(first)}
    drawn |= {"depth": depth_figure(first), "graphs": graph_figure(first)}
    seeds = "the first seed's" if len(every) > 1 else "its only seed's"
    about = {"protocol": said, "figures": f"of {seeds} training", "seeds": str(len(every))}
    data = {f"trajectory-seed{at}": found for at, found in enumerate(every)}
    details = {"steps": _steps(every)}
    return Report({"formation": _table(every)}, _findings(every), data, about, details, drawn)


def _plan(setting: ManySetting) -> Plan:
    if setting.scale == "paper":
        if setting.images is None:
            raise UnderstudyError("figure2 at paper scale trains on ImageNet-100: give its folder with --images.")
        data = labelled_pictures(setting.images, side=224)
        recipe = VitRecipe(
            f"vit-s-{data.name}", data, heads=6, head_width=64, layers=12, mlp_ratio=4, patch=16, init=0.02, epochs=100,
            batch=256, learning_rate=1e-3, warmup=2000, weight_decay=0.1, shift=16.0, flip=True,
        )  # fmt: skip
        epochs = (1, 2, 3, *range(5, 101, 5))
        return Plan(recipe, [3, 7, 11], "grid:16", setting.count or 512, epochs)
    recipe = MINI.one(DIGITS.data if setting.images is None else labelled_pictures(setting.images, side=MINI.side))
    whole = recipe.epochs
    epochs = tuple(sorted({0, 1, 2, 3, *(round(whole * share / 20) for share in range(1, 21))}))
    return Plan(recipe, "quarters", "refine", setting.count or 128, epochs)


def _trained(plan: Plan, setting: ManySetting, seed: int) -> xr.Dataset:
    unseen = plan.recipe.data.held_out
    return dynamics(
        plan.recipe,
        setting.folder / "models",
        unseen.take(range(min(plan.probe, len(unseen)))),
        epochs=plan.epochs,
        layers=plan.layers,
        search=plan.search,
        scored=unseen,
        seed=seed,
        progress=setting.bar(f"training seed {seed}"),
    )


def _of_checkpoints(setting: ManySetting) -> xr.Dataset:
    assert setting.checkpoints is not None
    if (setting.images is None) == (setting.texts is None):
        raise UnderstudyError("Checkpoints are measured on a probe set: give --images or --texts.")

    def inputs(model: nn.Module) -> Inputs:
        if setting.images is not None:
            return images(setting.images, model, count=setting.count, labels=setting.labels)
        assert setting.texts is not None
        return texts(setting.texts, model, count=setting.count)

    out = setting.folder / "runs" / f"checkpoints-{setting.checkpoints.resolve().name}"
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


def _findings(every: list[xr.Dataset]) -> tuple[Finding, ...]:
    layers = [int(layer) for layer in every[0]["layer"].to_numpy()]

    def early_and_late(found: xr.Dataset, place: int) -> float:
        similar = found["similarity"].isel(layer=place).to_numpy()
        return float(np.nanmean(similar[_at(found, 0.5) : -1]) - np.nanmean(similar[: _at(found, 0.25)]))

    def largest_fall(found: xr.Dataset) -> float:
        settled = found["similarity"].isel(step=slice(_at(found, 0.1), None))
        return max(
            max(float(a - b) for a, b in pairwise(settled.isel(layer=at).to_numpy())) for at in range(len(layers))
        )

    def range_of_layers(found: xr.Dataset) -> float:
        here = found["similarity"].isel(step=_at(found, 0.75))
        return float(here.max() - here.min())

    def unlike_when_good(found: xr.Dataset) -> float:
        metric = found["metric"].to_numpy()
        done = (metric - metric[0]) / (metric[-1] - metric[0])
        return ALIKE - float(found["similarity"].isel(step=int((done >= 0.95).argmax())).mean())

    def growth(found: xr.Dataset) -> float:  # orders of magnitude
        effect = found["drop"].mean(("layer", "source"))
        return float(np.log10(effect.isel(step=-1) / effect.isel(step=0)))

    def contrast(of: Callable[[xr.Dataset], float], less: float = 0.0) -> Contrast:
        return over_seeds([of(found) - less for found in every])

    findings = [
        Finding.beyond_spread(
            "Organization forms gradually: the graph is nearer to the last one late than early, at every layer",
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
    ("seeds", "images", "labels", "texts", "checkpoints", "count", "engine"),
    {
        "mini": "the digits recipe, 23 measurements of 128 held-out digits at three layers; about four minutes a seed. "
        "It can be interrupted and goes on. With --checkpoints, a training of yours",
        "paper": "a ViT-S trained for 100 epochs on ImageNet-100 in a folder (--images), 512 held-out pictures at "
        "layers 3, 7 and 11; accelerators",
    },
    run,
)
