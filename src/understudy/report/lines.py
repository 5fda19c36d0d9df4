"""The parts of a panel over training: a line with its hover texts, and warm-up shaded behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from understudy.report.read import Bools, Floats, Time, runs
from understudy.report.theme import GREY, SHADE, SMALL

# The opacity of the shade where every layer is in warm-up; a layer alone has its share of it.
OPACITY = 0.3


def line(
    time: Time,
    values: Floats,
    words: str,
    colour: str,
    *,
    symbol: str = "circle",
    hollow: Bools | None = None,
    thin: bool = False,
    digits: str = ".4f",
    **more: Any,
) -> go.Scatter:
    """Return a line over training; `hollow` steps have open markers, `thin` lines are dashed.

    `words` is what the hover text calls the number, already escaped.
    """
    # A point between two that are missing shows by its marker only, so markers never vanish.
    size = 2.5 if thin else 5 if len(values) <= 40 else 3
    fill = np.where(np.zeros(len(values), np.bool_) if hollow is None else hollow, "white", colour)
    return go.Scatter(
        x=time.values,
        y=values,
        mode="lines+markers",
        line={"color": colour, "width": 1 if thin else 1.8, "dash": "4px,3px" if thin else "solid"},
        marker={"symbol": symbol, "size": size, "color": fill.tolist(), "line": {"color": colour, "width": 1}},
        opacity=0.75 if thin else 1,
        customdata=time.labels(),
        hovertemplate=f"%{{customdata}}<br>{words}: %{{y:{digits}}}<extra></extra>",
        **more,
    )


def legend_entry(name: str, colour: str, *, thin: bool = False) -> go.Scatter:
    """Return a trace that is only in the legend, where a line's own entry would take the look of its first point."""
    look = line(Time("", np.zeros(0, np.int64), np.zeros(0), np.zeros(0)), np.zeros(0), "", colour, thin=thin)
    return look.update(x=[None], y=[None], marker_color=colour, name=name, legendgroup=name, showlegend=True)


def shade_warmup(figure: go.Figure, time: Time, marked: Bools, row: int, col: int, *, label: bool = True) -> None:
    """Shade a panel where layers are in warm-up, the darker the more layers are; `marked` is `[step, layer]`."""
    for layer in range(marked.shape[1]):
        for first, end in runs(marked[:, layer]):
            _rectangle(figure, time, first, end, row, col, y0=0, y1=1, opacity=OPACITY / marked.shape[1])
    stretches = runs(np.asarray(marked.any(axis=1)))
    if label and stretches:
        figure.add_annotation(
            text="warm-up",
            x=float(time.edges[stretches[0][0]]),
            y=1,
            xref="x",
            yref="y domain",
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
            font={"size": SMALL, "color": GREY},
            row=row,
            col=col,
        )


def strip_warmup(figure: go.Figure, time: Time, marked: Bools, row: int, col: int, *, pixels: int) -> None:
    """Mark warm-up by a strip above a heat map, whose colours a shade would change; `marked` is `[step]`.

    `pixels` is the height of the panel.
    """
    for first, end in runs(marked):
        _rectangle(figure, time, first, end, row, col, y0=1 + 2 / pixels, y1=1 + 6 / pixels, opacity=0.8)


def _rectangle(figure: go.Figure, time: Time, first: int, end: int, row: int, col: int, **more: float) -> None:
    figure.add_shape(
        type="rect",
        x0=float(time.edges[first]),
        x1=float(time.edges[end]),
        xref="x",
        yref="y domain",
        fillcolor=SHADE,
        line_width=0,
        layer="below",
        row=row,
        col=col,
        **more,
    )
