"""Section 4.1, directionality: S(i→j) against S(j→i)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from understudy.measurement import measure
from understudy.organize.bootstrap import interval, value
from understudy.organize.direction import gap, one_sided
from understudy.organize.organization import LEVELS, each_layer, measured, only_complete, substitutability
from understudy.organize.pooled import Array, Ranked, pooled_mean
from understudy.reproduce.study import Finding, Report, Setting, Study, beside

PAPER = {"gap_median": 0.0785, "gap_upper": 0.1767, "one_sided_10": 0.0394, "one_sided_25": 0.0162}


def run(setting: Setting) -> Report:
    """The paper's grid, whose exact zeros the one-sided shares need. All pairs count alike, whatever their layer."""
    inputs = setting.inputs(32)
    found = measure(setting.model, inputs, layers="all", search="grid:31", progress=setting.bar("inputs"))
    (found,) = measured(found)
    known = [only_complete(S) for S in each_layer(substitutability(found))]
    gaps = np.concatenate([gap(S) for S in known], axis=1)  # [inputs, pairs of all layers]
    ranked = Ranked(gaps)
    shares = {
        name: pooled_mean([np.concatenate([one_sided(S, level, 0.0) for S in known], axis=1)])
        for name, level in LEVELS.items()
    }

    def statistic(draws: Array) -> Array:  # [figures, resamples]
        quantiles = [ranked.quantile(draws, q) for q in (0.5, 0.75)]
        return np.stack([*quantiles, *(share(draws)[0] for share in shares.values())])

    low, high = interval(statistic, len(gaps))
    ours = pd.Series(dict(zip(PAPER, value(statistic, len(gaps)).tolist(), strict=True)))
    table = pd.DataFrame({"ours": ours, "paper": beside(ours, PAPER), "ours_low": low, "ours_high": high})
    pairs = int(np.isfinite(gaps).sum())
    findings = (
        Finding.of(
            "Substitution has a direction: the gap between the two is above zero, and its interval too",
            f"median {ours['gap_median']:.4f} over {pairs:,} pairs of heads",
            (float(low[0]), 0.0),
        ),
        Finding.of(
            "Strongly one-sided relations are uncommon: fewer than one pair in ten",
            f"{ours['one_sided_10']:.2%} at 0.10, {ours['one_sided_25']:.2%} at 0.25",
            (0.1, float(ours["one_sided_10"])),
        ),
    )
    return Report({"direction": table.rename_axis("figure")}, findings, {"run": found})


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
