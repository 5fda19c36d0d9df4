"""What Tables 4 and 5 share: shapes are trained once for each seed, and their figures stand beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from understudy.recipes.gpt2 import Shape
from understudy.reproduce.many import ManySetting, spread_of
from understudy.reproduce.study import put_after
from understudy.scaling.controlled import MINI, PAPER, Controlled, member, protocol, shared_text
from understudy.scaling.family import points
from understudy.scaling.table import figures, mean_over_seeds

COLUMNS = ("loss", "raw", "matched2", "cover", "rank", "effective_rank")


@dataclass(frozen=True)
class Shapes:
    """The figures of every shape and seed, and how they were found."""

    figures: pd.DataFrame  # by shape and seed
    about: Mapping[str, object]

    def rows(self, shapes: Mapping[tuple[str, ...], Shape], names: Sequence[str]) -> pd.DataFrame:
        """One row for each name of a shape: means over seeds. A shape may have several names."""
        table = mean_over_seeds(self.figures).rename(columns=lambda name: str(name).replace("metric", "loss"))
        table = table.loc[[shape.name for shape in shapes.values()]]
        return table.set_index(pd.MultiIndex.from_tuples(list(shapes), names=list(names)))


def preset_of(setting: ManySetting) -> Controlled:
    """The preset of a scale, with the user's corpus."""
    preset = {"mini": MINI, "paper": PAPER}[setting.scale]
    return preset if setting.corpus is None else replace(preset, corpus=setting.corpus)


def measured_shapes(preset: Controlled, shapes: Sequence[Shape], setting: ManySetting) -> Shapes:
    """Train, measure and score each shape for each seed, unless that is done."""
    models = setting.folder / "models"
    text = shared_text(preset, models)
    # Seed by seed: an interrupted study has whole seeds first.
    asked = [(shape, seed) for seed in range(setting.seeds) for shape in shapes]
    members = [member(shape, preset, text, models, seed) for shape, seed in asked]
    shared = protocol(preset, text)
    found = points(members, shared, setting.folder / "runs", engine=setting.engine, bar=setting.bar)
    table = figures(found, tau=shared.tau)
    table.index = pd.MultiIndex.from_tuples([(shape.name, seed) for shape, seed in asked], names=["model", "seed"])
    about: dict[str, object] = {
        "protocol": f"{preset.contexts} held-out contexts of {preset.length} tokens, quarters of the depth, search "
        f"{preset.search}, tau {shared.tau:g}; loss on {found[0].metric.count:,} held-out tokens",
        "trained on": f"{preset.budget.tokens:,} tokens of {text.about['corpus']}, contexts of "
        f"{preset.budget.context}, vocabulary {text.about['size']}",
        "spread": spread_of(setting.seeds),
    }
    return Shapes(table, {**about, "runs": [f"runs/{point.name}.zarr" for point in found]})


def with_paper(table: pd.DataFrame, paper: Sequence[Sequence[float]]) -> pd.DataFrame:
    """The paper's figures beside ours, setting by setting."""
    for name, values in zip(COLUMNS, zip(*paper, strict=True), strict=False):
        put_after(table, name, f"{name}_paper", pd.Series(list(values), index=table.index))
    return table if len(paper[0]) == len(COLUMNS) else table[[c for c in table if "effective_rank" not in str(c)]]
