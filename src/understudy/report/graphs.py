"""The mean graph at some checkpoints: who stands in best for whom, and whose removal is felt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from understudy.errors import UnderstudyError
from understudy.report.draw import FLOOR, REACH, draw_graph, strongest_edges
from understudy.report.read import layer_names, need, training_time, warmup
from understudy.report.theme import GREY, INK, SEQUENTIAL, SHADE, SMALL, WIDTH, colour_bar, dress

SNAPSHOTS = 5
CAPTION = (
    "Arrow: the strongest positive edge of a source.<br>"
    "Node area: mean deletion effect, relative to the largest of the layer."
)
LEFT, RIGHT, TOP, FOOT = 34, 74, 52, 44  # px around the panels
LARGEST = 190  # px of a panel, at most
NARROWEST = 440  # px of the figure, at least: its words must fit


def graph_figure(trajectory: xr.Dataset, *, steps: Sequence[int] | None = None) -> go.Figure:
    """Return snapshots of the mean graph: a row a layer, a column a step.

    For each source only its strongest positive edge is drawn, to the substitute that recovers most; a source without
    one has none. The area of a node is its mean deletion effect, relative to the largest of the layer's snapshots.

    Args:
        trajectory: the measured checkpoints; `graph` and `drop` are drawn.
        steps: the training steps to show, each one of the trajectory's; by default five, from the first to the last.

    """
    need(trajectory, "graph", "drop")
    at = _chosen(trajectory, steps)
    time, marked, names = training_time(trajectory), warmup(trajectory), layer_names(trajectory)
    rows, cols = len(names), len(at)
    panel = min(LARGEST, (WIDTH - LEFT - RIGHT) / cols)
    figure = make_subplots(rows=rows, cols=cols, horizontal_spacing=0, vertical_spacing=0)
    chosen = trajectory[["graph", "drop"]].isel(step=at).transpose("step", "layer", "source", ...)
    graphs, drops = chosen["graph"].to_numpy(), chosen["drop"].to_numpy()
    found = [S for row in graphs for graph in row for _, _, S in strongest_edges(graph)]
    top = float(np.ceil(10 * max(found, default=1.0) - 1e-9) / 10)
    for layer in range(rows):
        known = drops[:, layer][np.isfinite(drops[:, layer])]
        for col, step in enumerate(at):
            draw_graph(
                figure,
                graphs[col, layer],
                drops[col, layer],
                layer + 1,
                col + 1,
                names=[str(name) for name in trajectory["source"].to_numpy()],
                top=top,
                largest=float(known.max(initial=0.0)),
            )
            if marked[step, layer]:
                _mark_warmup(figure, layer + 1, col + 1)
    where = {"xref": "x domain", "yref": "y domain", "showarrow": False, "font": {"color": INK}}
    for col, step in enumerate(at):
        words = {"text": time.label(step), "x": 0.5, "y": 1, "yanchor": "bottom", "yshift": 2}
        figure.add_annotation(**words, **where, row=1, col=col + 1)
    for layer, name in enumerate(names):
        words = {"text": name, "x": 0, "y": 0.5, "xanchor": "right", "xshift": -4, "textangle": -90}
        figure.add_annotation(**words, **where, row=layer + 1, col=1)
    height = round(rows * panel * (REACH + FLOOR) / (2 * REACH) + TOP + FOOT)
    dress(figure, "Mean graph over training", trajectory.attrs.get("model"), height=height)
    _colour_bar(figure, top)
    figure.update_layout(width=max(NARROWEST, round(cols * panel) + LEFT + RIGHT))
    return figure


def _chosen(trajectory: xr.Dataset, steps: Sequence[int] | None) -> list[int]:
    known = trajectory["step"].to_numpy()
    if steps is None:
        return sorted({int(at) for at in np.linspace(0, len(known) - 1, min(SNAPSHOTS, len(known))).round()})
    lacks = [step for step in steps if step not in known]
    if lacks or not len(steps):
        raise UnderstudyError(
            f"steps is {list(steps)}, but the trajectory was measured at {', '.join(map(str, known))}: choose of these."
        )
    return [int(np.flatnonzero(known == step)[0]) for step in steps]


def _mark_warmup(figure: go.Figure, row: int, col: int) -> None:
    domain = {"xref": "x domain", "yref": "y domain", "row": row, "col": col}
    inside = {"type": "rect", "x0": 0.02, "x1": 0.98, "y0": 0.02, "y1": 0.98, "layer": "below"}
    figure.add_shape(**inside, fillcolor=SHADE, opacity=0.16, line_width=0, **domain)
    words = {"text": "warm-up", "x": 0.5, "y": 0.02, "xanchor": "center", "yanchor": "bottom", "showarrow": False}
    figure.add_annotation(**words, font={"size": SMALL - 1, "color": GREY}, **domain)


def _colour_bar(figure: go.Figure, top: float) -> None:
    bar = colour_bar("S(source → substitute)")
    figure.update_layout(
        coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": top, "colorbar": bar},
        margin={"l": LEFT, "r": RIGHT, "t": TOP, "b": FOOT},
    )
    # The bar belongs to a marker that is nowhere: edges have each their own colour.
    unseen = {"color": [0], "coloraxis": "coloraxis"}
    figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=unseen, name="scale", hoverinfo="skip"))
    figure.add_annotation(
        text=CAPTION,
        x=0, y=0, xref="paper", yref="paper", xanchor="left", yanchor="top", yshift=-8, align="left", showarrow=False,
        font={"size": SMALL, "color": GREY},
    )  # fmt: skip
