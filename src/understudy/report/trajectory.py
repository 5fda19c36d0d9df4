"""Performance and organization throughout training, as small multiples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from understudy.report.lines import line, shade_warmup
from understudy.report.read import Floats, Time, need, training_time, warmup
from understudy.report.theme import GREY, PALETTE, SHADE, SYMBOLS, dress, escape, key, panel_title, quiet_axes


@dataclass(frozen=True)
class Panel:
    """One of the small multiples: its title, its lines by name, and its y axis."""

    title: str
    lines: dict[str, Floats]
    axis: dict[str, Any] = field(default_factory=dict)
    level: float | None = None


SHARE = {"range": [-0.03, 1.05]}


def trajectory_figure(trajectory: xr.Dataset) -> go.Figure:
    """Return the task metric, Raw and Matched-2, coverage, rank, deletion effects and valid sources over training.

    Each number is the mean over the layers that have one. Without a task metric its panel is left out.

    Args:
        trajectory: the measured checkpoints.

    """
    need(trajectory, "raw", "matched", "coverage", "rank", "drop", "valid")
    time, marked, panels = training_time(trajectory), warmup(trajectory), _panels(trajectory)
    rows = (len(panels) + 1) // 2
    height = 100 + 130 * rows
    figure = make_subplots(rows=rows, cols=2, horizontal_spacing=0.1, vertical_spacing=38 / (height - 98))
    for at, panel in enumerate(panels):
        row, col = at // 2 + 1, at % 2 + 1
        figure.add_traces(_traces(panel, time), rows=row, cols=col)
        keys = [key(words, *style) for words, style in zip(panel.lines, _styles(panel), strict=True)]
        if panel.level is not None:
            keys.append(key(f"threshold {panel.level:g}", GREY, "┄"))
        keys = keys if len(keys) > 1 else []
        if at == 0 and marked.any():
            keys.append(key("warm-up", SHADE, "square"))
        panel_title(figure, "  ".join([f"<b>{panel.title}</b>", *keys]), row, col)
        shade_warmup(figure, time, marked, row, col, label=False)
        lowest = at + 2 >= len(panels)
        figure.update_yaxes(**panel.axis, row=row, col=col)
        figure.update_xaxes(range=time.span, matches="x", showticklabels=lowest, row=row, col=col)
        if lowest:
            figure.update_xaxes(title_text=time.name, row=row, col=col)
    quiet_axes(figure)
    return dress(figure, "Performance and organization over training", trajectory.attrs.get("model"), height=height)


def _panels(trajectory: xr.Dataset) -> list[Panel]:
    panels = []
    if "metric" in trajectory and np.isfinite(trajectory["metric"].to_numpy()).any():
        name = escape(trajectory.attrs.get("metric") or "task metric", longest=30)
        panels.append(Panel(f"Performance: {name}", {name: trajectory["metric"].to_numpy()}))
    recovered = {"Raw": over_layers(trajectory["raw"]), "Matched-2": over_layers(trajectory["matched"])}
    panels.append(Panel("Substitutability, S", recovered, {"rangemode": "tozero"}))
    cover = {
        f"{'τ = ' if at == 0 else ''}{tau:g}": over_layers(trajectory["coverage"].isel(tau=at))
        for at, tau in enumerate(trajectory["tau"].to_numpy())
    }
    panels.append(Panel("Coverage, Cover/H", cover, SHARE))
    panels.append(Panel("Effective rank, Rank/H", {"Rank/H": over_layers(trajectory["rank"])}, SHARE))
    threshold = trajectory.attrs.get("threshold")
    level = float(threshold) if threshold else None
    axis = {"type": "log", "tickformat": ".0e"}
    effect = {"mean": over_layers(trajectory["drop"].mean("source"))}
    panels.append(Panel("Deletion effect, KL (nats)", effect, axis, level))
    panels.append(Panel("Valid sources, share", {"valid": over_layers(trajectory["valid"])}, SHARE))
    return panels


def over_layers(values: xr.DataArray) -> Floats:
    """Return the mean over the layers that have a number: `[step]`."""
    found: Floats = values.mean("layer", skipna=True).to_numpy()
    return found


def _styles(panel: Panel) -> Sequence[tuple[str, str]]:
    symbols = list(SYMBOLS)
    return [(PALETTE[at % len(PALETTE)], symbols[at % len(symbols)]) for at in range(len(panel.lines))]


def _traces(panel: Panel, time: Time) -> list[go.Scatter]:
    digits = ".3e" if panel.axis.get("type") == "log" else ".4f"
    traces = [
        line(
            time,
            values,
            f"{panel.title}, {words}" if len(panel.lines) > 1 else panel.title,
            colour,
            symbol=symbol,
            digits=digits,
            name=words,
        )
        for (words, values), (colour, symbol) in zip(panel.lines.items(), _styles(panel), strict=True)
    ]
    if panel.level is not None:
        # A trace and not a shape, so that the axis makes room for it.
        style = {"color": GREY, "width": 1, "dash": "dot"}
        hover = f"threshold {panel.level:g}<extra></extra>"
        ends = {"x": time.span, "y": [panel.level] * 2, "mode": "lines", "name": "threshold"}
        traces.append(go.Scatter(**ends, line=style, hovertemplate=hover))
    return traces
