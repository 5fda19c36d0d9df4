"""A run as tables on a console."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from rich import box
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from understudy.organize.summary import summary
from understudy.planning import Plan
from understudy.store import MEASURED, NOISE_FACTOR

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
    if "asked" in at:
        lines.append(f"still being measured: these are {inputs} of {at['asked']} inputs")
    lines += _left_out(run)
    noisy = int((NOISE_FACTOR * run["noise"].max("layer") > at["threshold"]).sum())
    if noisy:
        lines.append(
            f"on {noisy} inputs 100 times the noise is above the threshold {at['threshold']:g} and replaces it"
        )
    return Text("\n".join(lines))


def _left_out(run: xr.Dataset) -> list[str]:
    """Inputs without numbers, and files that were skipped, named with the reason."""
    lines = []
    status = run["status"].values.astype(str)
    without = [(str(name), why) for name, why in zip(run["input"].values, status, strict=True) if why != MEASURED]
    skipped = list(json.loads(run.attrs.get("skipped", "{}")).items())
    for what, named in (("could not be measured", without), ("were skipped", skipped)):
        if named:
            shown = "; ".join(f"{name}: {why}" for name, why in named[:3])
            lines.append(f"{len(named)} inputs {what} ({shown}{'; ...' if len(named) > 3 else ''})")
    return lines


def plan_table(name: str, plan: Plan, rate: float | None) -> Table:
    """What a run will take."""
    layers = len(plan.layers)
    table = Table(
        title=f"{name}: {plan.inputs:,} inputs, {layers} layer{'s' * (layers != 1)} of {plan.units} units, "
        f"search {plan.search}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=False,
        padding=(0, 1),
    )
    table.add_row("downstream evaluations", f"{plan.evaluations:,.0f}")
    table.add_row("floating-point operations", f"{plan.flops:.2e}")
    at = f"at {rate:.1e} operations a second" if rate is not None else "on this machine, by timing a few rows"
    table.add_row("time", f"{_duration(plan.seconds)} {at}")
    table.add_row("memory", f"{_size(plan.weights)} of weights, and at most {_size(plan.budget)}")
    table.add_row("on disk", f"{_size(plan.disk)} before compression")
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}" if unit != "bytes" else f"{size:,.0f} bytes"
        size /= 1024
    return f"{size:,.1f} TiB"


def summary_table(run: xr.Dataset) -> Table:
    """The summary with 95% intervals, one row a layer and one for all."""
    found = summary(run)
    columns = {"raw": "Raw", "matched2": "Matched-2", "cover50": "Cover/H", "rank": "Rank/H"}
    if "cover50_exempt" in found:
        columns["cover50_exempt"] = "Cover/H\nexempt"
    kind = str(run.attrs.get("units", "heads")).partition(":")[0]
    table = Table(
        title=f"how far {kind} stand in for each other", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("layer", justify="right", style="bold", no_wrap=True)
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("valid", justify="right", no_wrap=True)
    for layer, row in found.iterrows():
        cells = [_with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in columns]
        if layer == "all":
            table.add_section()
        table.add_row(str(layer), *cells, f"{row['valid']:.1%}")
    notes = ["Raw: best substitute of a source; Matched-2: best of two. Cover/H: units that must stay at tau 0.5."]
    if "cover50_exempt" in found:
        notes.append("Exempt: invalid sources need no cover.")
    if found["partial"].any():
        notes.append("Not every pair was run: of these columns only Raw can be said.")
    notes.append("Below each: 95% interval over inputs. Valid: sources whose removal matters.")
    table.caption, table.caption_justify, table.caption_style = " ".join(notes), "left", "dim"
    return table


# Beyond this many units a matrix of numbers is no picture any more, and a console is too narrow for it.
_MOST_UNITS = 16


def matrix_table(run: xr.Dataset, layer: int, input: str | None = None) -> Table:
    """S of one layer as a heat map: of one input, or the mean over all, with the substitute that is best most often."""
    there = run.sel(layer=layer)
    if input is not None:
        there = there.isel(input=[list(map(str, run["input"].values)).index(input)])
    values = there["substitutability"].values  # [input, source, substitute]
    drop = there["drop"].mean("input").values
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left", caption_justify="left", caption_style="dim"
    )
    what = f"S on {escape(input)} alone" if input is not None else f"mean S over {len(values)} inputs"
    table.title = f"layer {layer}: {what}, source i (row) by substitute j (column)"
    table.add_column("i", justify="right", style="bold")
    shown = len(drop) if len(drop) <= _MOST_UNITS else 0
    for j in range(shown):
        table.add_column(str(j), justify="right", no_wrap=True)
    table.add_column("best j", justify="right", no_wrap=True)
    table.add_column("S" if input is not None else "on", justify="right")
    table.add_column("valid", justify="right")
    table.add_column("D_drop", justify="right")
    for i in range(len(drop)):
        rows = values[:, i][~np.isnan(values[:, i]).all(-1)]  # where i is valid
        if not len(rows):
            table.add_row(str(i), *["·"] * shown, "-", "-", "0%", f"{drop[i]:.1e}")
            continue
        best = np.bincount(np.nanargmax(rows, -1), minlength=len(drop))
        modal = int(max(range(len(drop)), key=lambda j: (best[j], np.nan_to_num(rows[:, j], nan=-1.0).mean())))
        share = f"{np.nanmax(rows):.0%}" if input is not None else f"{best.max() / len(rows):.0%}"
        cells = [_cell(rows[:, j][~np.isnan(rows[:, j])]) for j in range(shown)]
        table.add_row(str(i), *cells, str(modal), share, f"{len(rows) / len(values):.0%}", f"{drop[i]:.1e}")
    if input is None:
        table.caption = "best j: the substitute that is best most often, and on which share of the inputs it is"
    return table


def _cell(values: np.ndarray) -> Text:
    if not len(values):  # the source itself, or a pair that was never run
        return Text("·", style="dim")
    value = float(values.mean())
    place = min(max(value, 0.0), 1.0) * (len(_SCALE) - 1)
    low = min(int(place), len(_SCALE) - 2)
    share = place - low
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_SCALE[low], _SCALE[low + 1], strict=True))
    ink = "#ffffff" if 0.3 * red + 0.6 * green + 0.1 * blue < 120 else "#000000"
    return Text(f"{value:.2f}", style=Style(color=ink, bgcolor=f"rgb({red},{green},{blue})"))


def _with_interval(value: float, low: float, high: float) -> str:
    if np.isnan(value):
        return "-"
    if np.isnan(low):
        return f"{value:.3f}"
    ends = "-".join(f"{end:.3f}".lstrip("0") for end in (low, high))
    return f"{value:.3f}\n[dim]{ends}[/]"
