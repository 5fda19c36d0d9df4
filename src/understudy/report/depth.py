"""Depth over training: rank and coverage of each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from understudy.errors import UnderstudyError
from understudy.report.lines import legend_entry, line, shade_warmup
from understudy.report.read import layer_names, need, training_time, warmup
from understudy.report.theme import dress, layer_colours, quiet_axes


def depth_figure(trajectory: xr.Dataset, *, tau: float = 0.5) -> go.Figure:
    """Return Rank/H (left) and Cover/H (right) of each layer over training.

    Args:
        trajectory: the measured checkpoints; `rank` and `coverage` are drawn.
        tau: the threshold of coverage, one of the trajectory's.

    """
    need(trajectory, "rank", "coverage")
    time, marked = training_time(trajectory), warmup(trajectory)
    taus = trajectory["tau"].to_numpy()
    if not np.isclose(taus, tau).any():
        raise UnderstudyError(
            f"tau is {tau:g}, but the trajectory holds coverage at {', '.join(f'{known:g}' for known in taus)}."
        )
    cover = trajectory["coverage"].isel(tau=int(np.flatnonzero(np.isclose(taus, tau))[0]))
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    panels = [("Effective rank, Rank/H", trajectory["rank"]), (f"Coverage, Cover/H (τ = {tau:g})", cover)]
    names, colours = layer_names(trajectory), layer_colours(trajectory.sizes["layer"])
    figure.add_traces([legend_entry(*layer) for layer in zip(names, colours, strict=True)], rows=1, cols=1)
    for col, (title, values) in enumerate(panels, start=1):
        for index, (name, colour) in enumerate(zip(names, colours, strict=True)):
            y = values.isel(layer=index).to_numpy()
            style: dict[str, Any] = {"name": name, "legendgroup": name, "showlegend": False}
            figure.add_trace(line(time, y, name, colour, hollow=marked[:, index], **style), row=1, col=col)
        shade_warmup(figure, time, marked, 1, col)
        figure.update_yaxes(title_text=title, range=[-0.02, 1.05], row=1, col=col)
        figure.update_xaxes(title_text=time.name, range=time.span, row=1, col=col)
    quiet_axes(figure)
    return dress(figure, "Depth-resolved organization", trajectory.attrs.get("model"), height=310, legend=True)
