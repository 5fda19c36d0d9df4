"""How the organization forms during training: the paper's Figure 2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from understudy.report.lines import legend_entry, line, shade_warmup, strip_warmup
from understudy.report.read import layer_names, need, training_time, unit, warmup
from understudy.report.theme import (
    DIVERGING,
    FONT,
    GREY,
    UNKNOWN,
    colour_bar,
    dress,
    layer_colours,
    panel_title,
    quiet_axes,
)

GAP = 26  # px between heat maps: room for a title
LEFT = {"similarity": "graph similarity<br>(Spearman)", "agreement": "top-1 agreement<br>(share of sources)"}


def formation(trajectory: xr.Dataset) -> go.Figure:
    """Return how near each checkpoint is to the final one.

    Left: the Spearman correlation of the mean graph with the final one (top) and the share of sources whose best
    substitute is the final one (bottom), a line a layer; thin dashed lines are means over inputs of the same.
    Right: for each layer, the Spearman correlation of each source's ranking of substitutes with the final ranking.

    Args:
        trajectory: the measured checkpoints.

    """
    need(trajectory, *LEFT, "ranking")
    layers = trajectory.sizes["layer"]
    # 9 px a source, but never so little that nothing is told apart, nor so much that a page is too short.
    heat = int(np.clip(9 * trajectory.sizes["source"], max(84, 300 // layers), max(120, 600 // layers)))
    inner = layers * (heat + GAP) - GAP
    # Of 2 x layers rows a heat map spans two, and a panel on the left as many as there are layers.
    specs: list[list[dict[str, Any] | None]] = [[None, None] for _ in range(2 * layers)]
    specs[0][0] = specs[layers][0] = {"rowspan": layers}
    for index in range(layers):
        specs[2 * index][1] = {"rowspan": 2}
    figure = make_subplots(
        rows=2 * layers,
        cols=2,
        specs=specs,
        column_widths=[0.55, 0.45],
        horizontal_spacing=0.09,
        vertical_spacing=GAP / inner,
    )
    for variable, title in LEFT.items():
        row = 1 if variable == "similarity" else 1 + layers
        _lines(figure, trajectory, variable, row)
        figure.update_yaxes(title_text=title, row=row, col=1)
    quiet_axes(figure)
    for index in range(layers):
        _heat_map(figure, trajectory, index, heat)
    bar = colour_bar("ranking similarity (Spearman)") | {"tickvals": [-1, 0, 1]}
    figure.update_layout(coloraxis={"colorscale": DIVERGING, "cmin": -1, "cmax": 1, "colorbar": bar})
    title = "Formation of functional organization"
    dress(figure, title, trajectory.attrs.get("model"), height=inner + 120, legend=True)
    return figure.update_layout(margin={"r": 80, "t": 78, "l": 62})


def _lines(figure: go.Figure, trajectory: xr.Dataset, variable: str, row: int) -> None:
    time, marked = training_time(trajectory), warmup(trajectory)
    names, first = layer_names(trajectory), row == 1
    for index, (name, colour) in enumerate(zip(names, layer_colours(len(names)), strict=True)):
        if first:
            figure.add_trace(legend_entry(name, colour), row=row, col=1)
        y = trajectory[variable].isel(layer=index).to_numpy()
        style: dict[str, Any] = {"name": name, "legendgroup": name, "showlegend": False}
        figure.add_trace(line(time, y, name, colour, hollow=marked[:, index], **style), row=row, col=1)
        if f"{variable}_inputs" in trajectory:
            y = trajectory[f"{variable}_inputs"].isel(layer=index).to_numpy()
            style = {"name": f"{name}, mean over inputs", "legendgroup": name, "showlegend": False}
            figure.add_trace(line(time, y, f"{name}, mean over inputs", colour, thin=True, **style), row=row, col=1)
    if first and f"{variable}_inputs" in trajectory:
        figure.add_trace(legend_entry("mean over inputs", GREY, thin=True), row=row, col=1)
    drawn = [trajectory[name].to_numpy() for name in (variable, f"{variable}_inputs") if name in trajectory]
    lowest = min([0.0, *(values[np.isfinite(values)].min(initial=0.0) for values in drawn)])
    figure.update_yaxes(range=[max(lowest, -1) - 0.05, 1.08], row=row, col=1)
    figure.update_xaxes(
        range=time.span, title_text=None if first else time.name, showticklabels=not first, row=row, col=1
    )
    shade_warmup(figure, time, marked, row, 1, label=first)


def _heat_map(figure: go.Figure, trajectory: xr.Dataset, index: int, pixels: int) -> None:
    time, marked, row = training_time(trajectory), warmup(trajectory), 2 * index + 1
    sources = trajectory["source"].to_numpy()
    word, name = unit(trajectory), layer_names(trajectory)[index]
    heads = list(range(len(sources)))  # rows by place, so that a cell is as high whatever the units are called
    figure.add_trace(
        go.Heatmap(
            x=time.edges,
            y=heads,
            z=trajectory["ranking"].isel(layer=index).transpose("source", "step").to_numpy(),
            customdata=[[f"{name}, {word} {source}<br>{when}" for when in time.labels()] for source in sources],
            hovertemplate="%{customdata}<br>ranking similarity: %{z:.4f}<extra></extra>",
            hoverongaps=False,
            coloraxis="coloraxis",
        ),
        row=row,
        col=2,
    )
    note = "" if index else f", each {word} <span style='color:{GREY}'>(grey: no ranking)</span>"
    panel_title(figure, name + note, row, 2, lift=6)
    strip_warmup(figure, time, marked[:, index], row, 2, pixels=pixels)
    figure.add_shape(
        type="rect", x0=0, x1=1, y0=0, y1=1, xref="x domain", yref="y domain", fillcolor=UNKNOWN, line_width=0,
        layer="below", row=row, col=2,
    )  # fmt: skip
    every = math.ceil(len(heads) * (FONT + 1) / pixels)
    ticks = {"tickvals": heads[::every], "ticktext": [str(source) for source in sources[::every]], "showgrid": False}
    figure.update_yaxes(range=[len(heads) - 0.5, -0.5], title_text=word, **ticks, row=row, col=2)
    last = index == trajectory.sizes["layer"] - 1
    figure.update_xaxes(range=time.span, title_text=time.name if last else None, showticklabels=last, row=row, col=2)
