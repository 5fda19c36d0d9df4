"""Table 5: one capacity, its heads cut three ways."""

from __future__ import annotations

import numpy as np
import pandas as pd

from understudy.reproduce.controlled import measured_shapes, preset_of, with_paper
from understudy.reproduce.many import ManySetting, ManyStudy
from understudy.reproduce.study import Finding, Report
from understudy.scaling.contrast import within_seeds
from understudy.scaling.controlled import Controlled

# Validation loss, Raw, Matched-2, Cover/H, Rank/H, effective rank; coarse to fine.
PAPER = (
    (3.5707, 0.2012, 0.1413, 0.9497, 0.9507, 5.704),
    (3.5752, 0.2125, 0.1241, 0.9766, 0.9335, 11.202),
    (3.5780, 0.2583, 0.1371, 0.9518, 0.8725, 20.939),
)


def run(setting: ManySetting) -> Report:
    """Train every cut once for each seed; their parameter counts are the same, which the preset has checked."""
    preset = preset_of(setting)
    found = measured_shapes(preset, list(preset.heads.values()), setting)
    table = with_paper(found.rows({(name,): shape for name, shape in preset.heads.items()}, ("cut",)), PAPER)
    findings = _findings(preset, found.figures)
    return Report({"capacity": table}, findings, {}, found.about, {"seeds": found.figures})


def _findings(preset: Controlled, figures: pd.DataFrame) -> tuple[Finding, ...]:
    cuts = [shape.name for shape in preset.heads.values()]
    coarse, *_, fine = cuts

    def slope(seed: pd.DataFrame) -> float:  # nats of loss for each unit of Raw, over the cuts
        raw, loss = (seed[column].loc[cuts].to_numpy(dtype=np.float64) for column in ("raw", "metric"))
        raw, loss = raw - raw.mean(), loss - loss.mean()
        return float((raw * loss).sum() / (raw**2).sum()) if (raw**2).sum() > 0 else float("nan")

    return (
        Finding.beyond_spread(
            "Finer heads have a higher Raw Oracle and a lower Rank/H",
            {
                "Raw rises by": within_seeds(figures, lambda seed: seed["raw"][fine] - seed["raw"][coarse]),
                "Rank/H falls by": within_seeds(figures, lambda seed: seed["rank"][coarse] - seed["rank"][fine]),
            },
        ),
        Finding.beyond_spread(
            "Lower substitutability goes with lower loss at fixed capacity",
            {"nats for each unit of Raw": within_seeds(figures, slope)},
        ),
        Finding.beyond_spread(
            "Coarse heads have the lower loss",
            {"by": within_seeds(figures, lambda seed: seed["metric"][fine] - seed["metric"][coarse])},
        ),
    )


STUDY = ManyStudy(
    "table5",
    "Functional organization at fixed capacity (section 5.3, Table 5)",
    dict.fromkeys(("mini", "paper"), ("seeds", "corpus", "engine")),
    {
        "mini": "three GPT-2s of 0.55 million parameters with 6, 12 or 24 heads, one of them the baseline of table4; "
        "about five minutes a seed more. It can be interrupted and goes on",
        "paper": "three GPT-2s of 124 million parameters with 6, 12 or 24 heads; the rest as in table4",
    },
    run,
)
