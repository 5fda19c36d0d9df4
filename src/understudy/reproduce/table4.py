"""Table 4: controlled scaling by width and by depth, from a shared baseline."""

from __future__ import annotations

import pandas as pd

from understudy.recipes.gpt2 import Shape
from understudy.reproduce.controlled import measured_shapes, preset_of, with_paper
from understudy.reproduce.many import ManySetting, ManyStudy
from understudy.reproduce.study import Finding, Report
from understudy.scaling.contrast import within_seeds
from understudy.scaling.controlled import Controlled

# Validation loss, Raw, Matched-2, Cover/H, Rank/H; small, shared baseline, large.
PAPER = {
    "width": (
        (3.7021, 0.1882, 0.1140, 0.9826, 0.9550),
        (3.5752, 0.2125, 0.1241, 0.9766, 0.9335),
        (3.4000, 0.2522, 0.1325, 0.9497, 0.8994),
    ),
    "depth": (
        (3.6252, 0.2406, 0.1264, 0.9236, 0.9159),
        (3.5752, 0.2125, 0.1241, 0.9766, 0.9335),
        (3.5024, 0.2154, 0.1334, 0.9722, 0.9286),
    ),
}


def run(setting: ManySetting) -> Report:
    """Train every shape once for each seed, and read both axes from them."""
    preset = preset_of(setting)
    shapes: dict[tuple[str, ...], Shape] = {("width", name): shape for name, shape in preset.width.items()}
    shapes |= {("depth", name): shape for name, shape in preset.depth.items()}
    found = measured_shapes(preset, list(dict.fromkeys(shapes.values())), setting)
    table = with_paper(found.rows(shapes, ("axis", "setting")), [row for axis in PAPER.values() for row in axis])
    findings = _findings(preset, found.figures)
    return Report({"scaling": table}, findings, {}, found.about, {"seeds": found.figures})


def _findings(preset: Controlled, figures: pd.DataFrame) -> tuple[Finding, ...]:
    narrow, *_, wide = (shape.name for shape in preset.width.values())
    (base,) = {shape.name for shape in preset.width.values()} & {shape.name for shape in preset.depth.values()}
    *_, deep = (shape.name for shape in preset.depth.values())

    def gained(seed: pd.DataFrame, column: str, shape: str) -> float:  # from the baseline to a shape
        return float(seed[column][shape] - seed[column][base])

    def per_nat(seed: pd.DataFrame, shape: str) -> float:
        lost = -gained(seed, "metric", shape)
        return gained(seed, "raw", shape) / lost if lost > 0 else float("nan")

    def per_million(seed: pd.DataFrame, shape: str) -> float:  # nats saved by a million added parameters
        return -gained(seed, "metric", shape) / (gained(seed, "parameters", shape) / 1e6)

    width = {
        "loss falls by": within_seeds(figures, lambda seed: seed["metric"][narrow] - seed["metric"][wide]),
        "Raw rises by": within_seeds(figures, lambda seed: seed["raw"][wide] - seed["raw"][narrow]),
        "Rank/H falls by": within_seeds(figures, lambda seed: seed["rank"][narrow] - seed["rank"][wide]),
    }
    cover = within_seeds(figures, lambda seed: seed["cover"][narrow] - seed["cover"][wide])
    return (
        Finding.beyond_spread("Widening lowers the loss, raises Raw Oracle and lowers Rank/H", width),
        Finding.beyond_spread("Widening lowers Cover/H", {"by": cover}),
        Finding.beyond_spread(
            "From the shared baseline, widening raises Raw Oracle more than deepening",
            {
                "by": within_seeds(figures, lambda seed: gained(seed, "raw", wide) - gained(seed, "raw", deep)),
            },
        ),
        Finding.beyond_spread(
            "The same for each nat of loss that it saves",
            {"by": within_seeds(figures, lambda seed: per_nat(seed, wide) - per_nat(seed, deep))},
        ),
        Finding.beyond_spread(
            "Deepening saves more loss for each parameter that it adds",
            {"nats a million": within_seeds(figures, lambda seed: per_million(seed, deep) - per_million(seed, wide))},
        ),
    )


STUDY = ManyStudy(
    "table4",
    "Controlled width and depth scaling (section 5.2, Table 4)",
    dict.fromkeys(("mini", "paper"), ("seeds", "corpus", "engine")),
    {
        "mini": "five GPT-2s of 0.3 to 1.2 million parameters, trained on the standard library's source; about a "
        "quarter of an hour a seed. It can be interrupted and goes on",
        "paper": "five GPT-2s of 77 to 250 million parameters, trained on 2.5 billion tokens of FineWeb-Edu (the paper "
        "states no corpus and no budget); accelerators",
    },
    run,
)
