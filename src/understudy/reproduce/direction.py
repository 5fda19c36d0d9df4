"""Section 4.1, directionality: S(i→j) against S(j→i)."""

from __future__ import annotations

import pandas as pd

from understudy.measurement import measure
from understudy.organize.summary import summary
from understudy.reproduce.study import Finding, Report, Setting, Study, beside

PAPER = {"gap_median": 0.0785, "gap_upper": 0.1767, "one_sided_10": 0.0394, "one_sided_25": 0.0162}


def run(setting: Setting) -> Report:
    """The paper's grid, whose exact zeros the one-sided shares need."""
    inputs = setting.inputs(32)
    found = measure(setting.model, inputs, layers="all", search="grid:31", progress=setting.bar("inputs"))
    columns = [f"{name}{end}" for name in PAPER for end in ("", "_low", "_high")]
    row = dict(zip(columns, summary(found).loc["all", columns].to_numpy(dtype=float).tolist(), strict=True))
    ours = pd.Series({name: row[name] for name in PAPER})
    table = pd.DataFrame({"ours": ours, "paper": beside(ours, PAPER)})
    for end in ("low", "high"):
        table[f"ours_{end}"] = [row[f"{name}_{end}"] for name in PAPER]
    pairs = found.sizes["input"] * found.sizes["layer"] * found.sizes["source"] * (found.sizes["source"] - 1) // 2
    findings = (
        Finding(
            "Substitution has a direction: the gap between the two is above zero, and its interval too",
            row["gap_median_low"] > 0,
            f"median {row['gap_median']:.4f} over {pairs:,} pairs of heads",
        ),
        Finding(
            "Strongly one-sided relations are uncommon: fewer than one pair in ten",
            row["one_sided_10"] < 0.1,
            f"{row['one_sided_10']:.2%} at 0.10, {row['one_sided_25']:.2%} at 0.25",
        ),
    )
    return Report({"direction": table.rename_axis("figure")}, findings)


STUDY = Study(
    "direction",
    "Substitution has a direction (section 4.1, appendix C.3)",
    {"mini": "digits", "paper": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"},
    {
        "mini": "the bundled digits model, 32 held-out digits; about a minute",
        "paper": "a ViT-S of 12 layers with 6 heads from the hub, 32 ImageNet images in a folder",
    },
    run,
)
