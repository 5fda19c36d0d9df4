"""A run as tables on a console."""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr
from rich.style import Style
from rich.table import Table
from rich.text import Text

from understudy.organize.summary import summary

# cividis at even steps: one scale for all readers, colour-blind ones too.
_SCALE = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 182, 104), (254, 232, 56))


def provenance(run: xr.Dataset) -> Text:
    """What was measured and how, in two lines."""
    at = run.attrs
    inputs, layers = run.sizes["input"], run.sizes["layer"]
    lines = [
        f"{at['model']} ({at['model_class']}): {inputs} input{'s' * (inputs != 1)}, "
        f"{layers} layer{'s' * (layers != 1)} of {run.sizes['source']} {at['units']}",
        f"outcome {at['outcome']}, search {at['search']}, {at['dtype']}"
        + (f" (captured in {at['captured']})" if at["captured"] != at["dtype"] else "")
        + f", {at['evaluations']:,} downstream evaluations in {at['seconds']:.1f} s",
    ]
    noisy = int((100 * run["noise"].max("layer") > at["threshold"]).sum())
    if noisy:
        lines.append(
            f"on {noisy} inputs 100 times the noise is above the threshold {at['threshold']:g} and replaces it"
        )
    return Text("\n".join(lines))


def summary_table(run: xr.Dataset) -> Table:
    """The summary with 95% intervals, one row a layer and one for all."""
    found = summary(run)
    columns = {"raw": "Raw Oracle", "matched2": "Matched-2", "cover50": "Cover/H (tau 0.5)", "rank": "Rank/H"}
    if "cover50_exempt" in found:
        columns["cover50_exempt"] = "Cover/H, invalid exempt"
    table = Table(title="how far heads stand in for each other (95% intervals over inputs)", title_justify="left")
    table.add_column("layer", justify="right", style="bold")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    table.add_column("valid sources", justify="right")
    for layer, row in found.iterrows():
        cells = [_with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in columns]
        if layer == "all":
            table.add_section()
        table.add_row(str(layer), *cells, f"{row['valid']:.1%}")
    return table


def matrix_table(run: xr.Dataset, layer: int) -> Table:
    """The mean S of one layer as a heat map: does the column stand in for the row."""
    there = run.sel(layer=layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing: a source that is never valid
        S = np.nanmean(there["substitutability"].values, axis=0)  # [source, substitute]
    drop = there["drop"].mean("input").values
    table = Table(title=f"layer {layer}: mean S of source i (row) by substitute j (column)", title_justify="left")
    table.add_column("i", justify="right", style="bold")
    for j in range(len(S)):
        table.add_column(str(j), justify="right")
    table.add_column("best substitute", justify="left")
    table.add_column("D_drop", justify="right")
    for i, row in enumerate(S):
        best = "never valid" if np.isnan(row).all() else f"{np.nanargmax(row)} recovers {np.nanmax(row):.0%}"
        table.add_row(str(i), *(_cell(value) for value in row), best, f"{drop[i]:.2g}")
    return table


def _cell(value: float) -> Text:
    if np.isnan(value):
        return Text("·", style="dim")
    place = min(max(value, 0.0), 1.0) * (len(_SCALE) - 1)
    low = min(int(place), len(_SCALE) - 2)
    share = place - low
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_SCALE[low], _SCALE[low + 1], strict=True))
    ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 130 else "black"
    return Text(f" {value:.2f} ", style=Style(color=ink, bgcolor=f"rgb({red},{green},{blue})"))


def _with_interval(value: float, low: float, high: float) -> str:
    if np.isnan(value):
        return "-"
    if np.isnan(low):
        return f"{value:.3f}"
    return f"{value:.3f} [dim]{low:.3f}-{high:.3f}[/]"
