"""A graph drawn in one panel: nodes on a circle, and the strongest edge of each source."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from understudy.report.read import Floats
from understudy.report.theme import INK, NODE, SEQUENTIAL, SMALL, escape

REACH = 1.6  # the panel's half side, the circle's radius being 1
FLOOR = 1.9  # the same downwards: room for a word below
UNIT = 36  # px of that radius in the smallest panel, by which edges keep off nodes
PULL = 0.25  # of the way to the centre, by which edges keep off the nodes between their ends
BEND = 0.16  # of an edge's length, always to the same hand: i -> j and j -> i then lie apart
HEAD = 0.25  # the arrowhead's length, straight, in radii
LABELS = 16  # numbers that fit around a circle


def strongest_edges(graph: Floats) -> list[tuple[int, int, float]]:
    """Return for each source its best substitute and S, where that S is positive: `(source, substitute, S)`.

    >>> strongest_edges(np.array([[np.nan, 0.2, 0.5], [-0.1, np.nan, 0.0], [0.3, np.nan, np.nan]]))
    [(0, 2, 0.5), (2, 0, 0.3)]

    Args:
        graph: S, `[source, substitute]`; the diagonal and NaN are no candidates.

    """
    known = np.where(np.isnan(graph) | np.eye(len(graph), dtype=np.bool_), -np.inf, graph)
    best = known.argmax(axis=1)
    return [(i, int(j), float(known[i, j])) for i, j in enumerate(best) if known[i, j] > 0]


def circle(count: int) -> Floats:
    """Return places on the unit circle, clockwise from the top: `[count, 2]`."""
    angle = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def arc(start: Floats, end: Floats, *, leave: float, arrive: float, points: int = 12) -> Floats:
    """Return a line from near one place to near another, bent to the centre: `[points, 2]`.

    It begins `leave` after the first place and stops `arrive` before the second, in radii of the circle.
    """
    way = end - start
    length = float(np.hypot(*way))
    # Near neighbours keep a third of the way, however large their nodes are.
    first, last = min(leave / length, 1 / 3), 1 - min(arrive / length, 1 / 3)
    neck = max(last - HEAD / length, (first + last) / 2)
    t = np.append(np.linspace(first, neck, points - 1), last)[:, None]
    control = (1 - PULL) * (start + end) / 2 + BEND * np.array([-way[1], way[0]])
    path: Floats = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    return path


def draw_graph(
    figure: go.Figure,
    graph: Floats,
    drop: Floats,
    row: int,
    col: int,
    *,
    names: Sequence[str] | None = None,
    top: float = 1.0,
    largest: float | None = None,
) -> None:
    """Draw the strongest positive edge of each source into a panel of a figure with subplots.

    Args:
        figure: made by `make_subplots`.
        graph: S, `[source, substitute]`.
        drop: the mean deletion effect of each source, the area of its node; NaN is a mere dot.
        row: the panel's row, from 1.
        col: the panel's column, from 1.
        names: what the units are called, by default their numbers.
        top: the S at the dark end of the colour scale.
        largest: the deletion effect of the largest node, by default the largest of `drop`.

    """
    names = [escape(name) for name in names] if names is not None else [str(i) for i in range(len(graph))]
    places, sizes = circle(len(graph)), diameters(drop, largest)
    keep_off = sizes / 2 / UNIT + 0.05
    traces = []
    crowd = min(1.0, math.sqrt(12 / len(graph)))  # lines are thinner where there are many
    for i, j, S in sorted(strongest_edges(graph), key=lambda edge: edge[2]):  # the strongest on top
        path = arc(places[i], places[j], leave=keep_off[i], arrive=keep_off[j])
        traces.append(_edge(path, f"{names[i]} → {names[j]}<br>S = {S:.4f}", S / top, crowd))
    traces += [_nodes(places, sizes, drop, names), _numbers(places, names)]
    figure.add_traces(traces, rows=row, cols=col)
    across = next(figure.select_xaxes(row=row, col=col)).plotly_name.replace("axis", "")
    plain = {"visible": False, "constrain": "domain", "row": row, "col": col}
    figure.update_xaxes(**plain, range=[-REACH, REACH])
    figure.update_yaxes(**plain, range=[-FLOOR, REACH], scaleanchor=across)


def diameters(drop: Floats, largest: float | None = None) -> Floats:
    """Return the px across each node: its area is in proportion to the deletion effect, but never less than a dot."""
    known = np.nan_to_num(np.asarray(drop, dtype=np.float64))
    most = largest if largest is not None else float(known.max(initial=0.0))
    widest = float(np.clip(105 / len(known), 6, 15))  # what lies side by side on the circle
    share = np.clip(known / most, 0, 1) if most > 0 else np.zeros(len(known))
    return np.maximum(widest * np.sqrt(share), 2.0)


def _edge(path: Floats, words: str, share: float, crowd: float) -> go.Scatter:
    share = min(share, 1.0)
    colour = sample_colorscale(SEQUENTIAL, [share])[0]
    width = crowd * (0.8 + 2.2 * share)
    room = 0.8 * UNIT * float(np.hypot(*(path[-1] - path[0])))
    # The arrowhead is the marker of the last point.
    tip = [0.0] * (len(path) - 1) + [min(crowd * 5 + 2 * width, room)]
    arrow = {"symbol": "arrow", "angleref": "previous"}
    return go.Scatter(
        x=path[:, 0],
        y=path[:, 1],
        mode="lines+markers",
        line={"color": colour, "width": width, "simplify": False},
        marker={**arrow, "size": tip, "color": colour, "opacity": 1, "line": {"width": 0}},
        hovertemplate=f"{words}<extra></extra>",
        name="edge",
        showlegend=False,
    )


def _nodes(places: Floats, sizes: Floats, drop: Floats, names: Sequence[str]) -> go.Scatter:
    words = [f"{name}<br>mean deletion effect: {value:.3e} nats" for name, value in zip(names, drop, strict=True)]
    return go.Scatter(
        x=places[:, 0],
        y=places[:, 1],
        mode="markers",
        marker={"size": sizes, "color": NODE, "opacity": 1, "line": {"color": "white", "width": 0.5}},
        customdata=words,
        hovertemplate="%{customdata}<extra></extra>",
        name="nodes",
        showlegend=False,
    )


def _numbers(places: Floats, names: Sequence[str]) -> go.Scatter:
    every = -(-len(names) // LABELS)
    shown = [name if at % every == 0 else "" for at, name in enumerate(names)]
    x, y = 1.4 * places.T
    text = {"mode": "text", "text": shown, "textfont": {"size": SMALL - 1, "color": INK}, "hoverinfo": "skip"}
    return go.Scatter(x=x, y=y, **text, name="numbers", showlegend=False)
