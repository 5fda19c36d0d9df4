"""Section 4.1, input conditioning: how far the best substitute depends on the input."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from understudy.inputs.perturbed import perturbed
from understudy.lens.conditioning import agreement, switching
from understudy.measurement import measure
from understudy.reproduce.study import Finding, Report, Setting, Study

PAPER = {
    "modal, median": 0.3125,
    "modal, mean": 0.3407,
    "modal, first quartile": 0.2813,
    "modal, third quartile": 0.3750,
    "switching, median": 0.6875,
    "distinct, mean": 4.97,
    "distinct, median": 5.0,
}
# Mild, stronger, and other inputs; what they are is said in the table.
PERTURBATIONS = {
    "pictures": ("colour", "flip"),
    "digits": ("colour", "shift"),
    "texts": ("replace:0.03", "replace:0.2"),
}
PAPER_AGREEMENT = ((0.833, 0.955), (0.500, 0.870), (0.167, 0.334))


def run(setting: Setting) -> Report:
    """Switching over inputs, and agreement under two perturbations and with other inputs."""
    inputs = setting.inputs(32)
    first = measure(setting.model, inputs, layers="all", search="grid:31", progress=setting.bar("inputs"))
    over = switching(first)
    ours = {
        "modal, median": over["modal"].median(),
        "modal, mean": over["modal"].mean(),
        "modal, first quartile": over["modal"].quantile(0.25),
        "modal, third quartile": over["modal"].quantile(0.75),
        "switching, median": over["switching"].median(),
        "distinct, mean": over["distinct"].mean(),
        "distinct, median": over["distinct"].median(),
    }
    table = pd.DataFrame({"ours": ours, "paper": PAPER}).rename_axis("best substitute")

    rows, runs = {}, {"inputs": first}
    for kind in PERTURBATIONS[_kind(inputs.batch([0]), inputs.about.get("kind"))]:
        changed = measure(
            setting.model, perturbed(inputs, kind), layers="all", search="grid:31", progress=setting.bar(kind)
        )
        rows[kind] = agreement(first, changed)
        runs[kind.replace(":", "-")] = changed
    rows["other inputs"] = agreement(first, first.roll(input=1, roll_coords=False))
    medians = pd.DataFrame({name: _medians(found) for name, found in rows.items()}).T.rename_axis("perturbation")
    for at, name in enumerate(("best_paper", "spearman_paper")):
        medians[name] = [each[at] for each in PAPER_AGREEMENT]
    return Report({"switching": table, "agreement": medians}, _findings(over, medians), runs)


def _kind(batch: object, kind: object) -> str:
    if "input_ids" in batch:  # type: ignore[operator]
        return "texts"
    return "digits" if kind == "digits" else "pictures"


def _medians(found: xr.Dataset) -> dict[str, float]:
    return {name: float(np.nanmedian(found[name].values)) for name in ("best", "spearman", "pearson")}


def _findings(over: pd.DataFrame, medians: pd.DataFrame) -> tuple[Finding, ...]:
    modal = float(over["modal"].median())
    return (
        Finding.of(
            "The preferred substitute is rarely fixed: on most inputs it is not the most frequent one",
            f"the most frequent one is best on {modal:.1%} of the inputs (median over sources)",
            (0.5, modal),
        ),
        *(
            Finding.of(
                f"{what} falls from the mild perturbation over the stronger one to other inputs",
                ", ".join(f"{name} {value:.3f}" for name, value in medians[column].items()),
                *zip(medians[column].iloc[:-1], medians[column].iloc[1:], strict=True),
            )
            for what, column in (("Agreement of best substitutes", "best"), ("Correlation of the matrices", "spearman"))
        ),
    )


STUDY = Study(
    "conditioning",
    "Substitution depends on the input (section 4.1, appendix C.2)",
    {"mini": "digits", "paper": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"},
    {
        "mini": "the bundled digits model, 32 held-out digits, three times; about two minutes. A digit mirrored is no "
        "digit: it is moved by a pixel instead",
        "paper": "a ViT-S of 12 layers with 6 heads from the hub, 32 ImageNet images in a folder",
    },
    run,
)
