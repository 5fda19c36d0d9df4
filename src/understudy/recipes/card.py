"""The card of a trained model: its README.md, written from measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.inputs.batch import Inputs
from understudy.measurement import measure
from understudy.organize.summary import summary
from understudy.recipes.record import Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_card(out: Path, *, name: str, summary: str, figures: Mapping[str, str], data: str) -> None:
    """Write `README.md`: what the model is, its figures, its data, its recipe and how to make it again."""
    record = Record.load(out)
    settings = {key: str(value) for key, value in {**record.recipe, **record.arguments}.items() if key != "name"}
    taken = {
        "seed": str(record.seed),
        "steps": f"{record.steps:,}",
        "examples seen": f"{record.examples:,}",
        "seconds": f"{record.seconds:.0f}",
    }
    blocks = [
        "---\nlicense: mit\nlibrary_name: transformers\ntags: [understudy]\n---",
        f"# {name}\n\n{summary}",
        "## Figures\n\nMeasured on held-out inputs.\n\n" + _table(figures),
        f"## Data\n\n{data}",
        f"## Training\n\nMade by `understudy train {name}` with {record.versions}.",
        _table({**settings, **taken}),
    ]
    (out / "README.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def card_figures(model: PreTrainedModel, inputs: Inputs) -> dict[str, str]:
    """What `measure` says of each layer: the share of valid sources, and how well the best substitute does."""
    run = measure(model, inputs, layers="all", search="grid:31")
    found = summary(run, resamples=0).drop(index="all")
    counted = {"inputs of the figures below": f"{len(inputs)}, search {run.attrs['search']}"}
    valid = {f"valid sources, layer {layer}": f"{row['valid']:.1%}" for layer, row in found.iterrows()}
    raw = {f"Raw Oracle, layer {layer}": f"{row['raw']:.3f}" for layer, row in found.iterrows()}
    return {**counted, **valid, **raw}


def _table(rows: Mapping[str, str]) -> str:
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
