from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
import xarray as xr
from plotly.subplots import make_subplots

from understudy.errors import UnderstudyError
from understudy.report import (
    can_export,
    depth_figure,
    draw_graph,
    export,
    formation,
    graph_figure,
    save,
    strongest_edges,
    trajectory_figure,
)
from understudy.report.draw import arc, circle, diameters
from understudy.report.read import edges
from understudy.report.theme import escape

FIGURES: list[Callable[[xr.Dataset], go.Figure]] = [formation, trajectory_figure, depth_figure, graph_figure]


def trajectory(layers: int = 2, sources: int = 4, steps: int = 6, *, nan: float = 0.0, seed: int = 0) -> xr.Dataset:
    draw = np.random.default_rng(seed)
    sizes = {"step": steps, "layer": layers, "source": sources, "substitute": sources, "tau": 3}

    def numbers(*dims: str, low: float = 0.0) -> tuple[tuple[str, ...], Any]:
        values = draw.uniform(low, 1, [sizes[dim] for dim in dims])
        return dims, np.where(draw.random(values.shape) < nan, np.nan, values)

    found = {
        "graph": numbers("step", "layer", "source", "substitute", low=-0.5),
        "ranking": numbers("step", "layer", "source", low=-1),
        "coverage": numbers("step", "layer", "tau"),
        "drop": numbers("step", "layer", "source"),
        "metric": numbers("step"),
        "warmup": (("step", "layer"), np.arange(steps * layers).reshape(steps, layers) < layers),
    }
    for name in ("similarity", "similarity_inputs", "agreement", "agreement_inputs", "raw", "matched", "rank", "valid"):
        found[name] = numbers("step", "layer")
    found["graph"][1][..., range(sources), range(sources)] = np.nan
    coords = {
        "step": 100 * np.arange(1, steps + 1),
        "epoch": ("step", 0.5 * np.arange(1, steps + 1)),
        "layer": 3 + 4 * np.arange(layers),
        "source": np.arange(sources),
        "substitute": np.arange(sources),
        "tau": [0.25, 0.5, 0.75],
    }
    return xr.Dataset(found, coords, {"metric": "accuracy", "model": "tiny", "threshold": 1e-5})


def drawn(figure: go.Figure, name: str) -> list[np.ndarray]:
    """The y values of the traces of a name, without those that are only in the legend."""
    return [np.array(t.y, float) for t in figure.data if t.name == name and t.type == "scatter" and t.y[0] is not None]


@pytest.mark.parametrize("seed", range(20))
def test_the_strongest_edges_are_those_of_a_loop(seed: int) -> None:
    draw = np.random.default_rng(seed)
    H = int(draw.integers(2, 8))
    graph = draw.normal(-0.3, 0.5, (H, H)).round(1)
    graph[draw.random((H, H)) < 0.3] = np.nan
    expected = []
    for i in range(H):
        best = None
        for j in range(H):
            if j != i and graph[i, j] > 0 and (best is None or graph[i, j] > graph[i, best]):
                best = j
        if best is not None:
            expected.append((i, best, graph[i, best]))
    assert strongest_edges(graph) == expected


def test_formation_draws_the_numbers() -> None:
    given = trajectory(layers=3)
    figure = formation(given)
    for at, layer in enumerate((3, 7, 11)):
        for name, end in ((f"layer {layer}", ""), (f"layer {layer}, mean over inputs", "_inputs")):
            top, bottom = drawn(figure, name)
            np.testing.assert_array_equal(top, given[f"similarity{end}"][:, at])
            np.testing.assert_array_equal(bottom, given[f"agreement{end}"][:, at])
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    for at, trace in enumerate(maps):
        np.testing.assert_array_equal(trace.z, given["ranking"][:, at].T)
    assert len(maps) == 3
    assert "layer 7, head 2<br>epoch 1.5 (step 300)" in maps[1].customdata[2][2]


def test_the_trajectory_draws_means_over_layers() -> None:
    given = trajectory(nan=0.1)
    given["raw"][2] = np.nan
    figure = trajectory_figure(given)
    for name, values in {
        "accuracy": given["metric"],
        "Raw": given["raw"].mean("layer"),
        "Matched-2": given["matched"].mean("layer"),
        "τ = 0.25": given["coverage"][..., 0].mean("layer"),
        "0.5": given["coverage"][..., 1].mean("layer"),
        "0.75": given["coverage"][..., 2].mean("layer"),
        "Rank/H": given["rank"].mean("layer"),
        "mean": given["drop"].mean("source").mean("layer"),
        "valid": given["valid"].mean("layer"),
        "threshold": np.array([1e-5, 1e-5]),
    }.items():
        np.testing.assert_array_equal(drawn(figure, name), [values])


def test_depth_draws_each_layer() -> None:
    given = trajectory()
    rank, cover = drawn(depth_figure(given), "layer 7")
    np.testing.assert_array_equal(rank, given["rank"][:, 1])
    np.testing.assert_array_equal(cover, given["coverage"][:, 1, 1])
    np.testing.assert_array_equal(drawn(depth_figure(given, tau=0.75), "layer 7")[1], given["coverage"][:, 1, 2])
    with pytest.raises(UnderstudyError, match=r"tau is 0\.4, but the trajectory holds coverage at 0\.25, 0\.5, 0\.75"):
        depth_figure(given, tau=0.4)


def test_snapshots_draw_the_strongest_edges() -> None:
    given = trajectory(layers=2, steps=9)
    figure = graph_figure(given)
    hovers = sorted(trace.hovertemplate for trace in figure.data if trace.name == "edge")
    expected = [
        f"{i} → {j}<br>S = {S:.4f}<extra></extra>"
        for step in (0, 2, 4, 6, 8)
        for layer in range(2)
        for i, j, S in strongest_edges(given["graph"][step, layer].to_numpy())
    ]
    assert hovers == sorted(expected)
    titles = [note.text for note in figure.layout.annotations if note.text.startswith("epoch")]
    assert titles == ["epoch 0.5", "epoch 1.5", "epoch 2.5", "epoch 3.5", "epoch 4.5"]
    chosen = graph_figure(given.drop_vars("epoch"), steps=[300, 900])
    assert [note.text for note in chosen.layout.annotations if note.text.startswith("step")] == ["step 300", "step 900"]
    with pytest.raises(UnderstudyError, match=r"steps is \[301\], but the trajectory was measured at 100, 200"):
        graph_figure(given, steps=[301])


def test_edges_run_from_source_to_substitute_and_apart() -> None:
    places = circle(5)
    np.testing.assert_allclose(places[0], [0, 1], atol=1e-12)
    there = arc(places[1], places[3], leave=0.1, arrive=0.1)
    back = arc(places[3], places[1], leave=0.1, arrive=0.1)
    for path, i, j in ((there, 1, 3), (back, 3, 1)):
        assert 0 < np.hypot(*(path[0] - places[i])) < 0.2
        assert 0 < np.hypot(*(path[-1] - places[j])) < 0.2
    assert np.hypot(*(there[5] - back[5])) > 0.1


def test_the_area_of_a_node_is_its_deletion_effect() -> None:
    sizes = diameters(np.array([1.0, 4.0, np.nan, 0.0]))
    assert (sizes[1] / sizes[0]) ** 2 == pytest.approx(4)
    assert sizes[2] == sizes[3] == 2  # a dot
    assert diameters(np.array([1.0, 1.0]), 4.0)[0] == pytest.approx(diameters(np.array([1.0, 4.0]))[0])


def test_one_graph_can_be_drawn_alone() -> None:
    figure = make_subplots(rows=1, cols=2)
    graph = np.array([[np.nan, 0.5], [0.0, np.nan]])
    draw_graph(figure, graph, np.array([1e-3, np.nan]), 1, 2, names=["<i>a</i>", "b"])
    assert [trace.name for trace in figure.data] == ["edge", "nodes", "numbers"]
    assert {trace.xaxis for trace in figure.data} == {"x2"}
    assert figure.layout.yaxis2.scaleanchor == "x2"
    assert figure.data[0].hovertemplate == "&lt;i&gt;a&lt;/i&gt; → b<br>S = 0.5000<extra></extra>"


@pytest.mark.parametrize("figure", FIGURES)
def test_gaps_do_not_matter(figure: Callable[[xr.Dataset], go.Figure]) -> None:
    small = trajectory(layers=1, sources=3, steps=2, nan=0.6).drop_vars(["metric", "epoch", "warmup"])
    small.attrs = {}
    empty = trajectory(layers=2)
    for name in empty.data_vars:
        empty[name] = empty[name] if name == "warmup" else xr.full_like(empty[name], np.nan)
    for given in (small, empty, trajectory(layers=7, sources=18, steps=2), trajectory(steps=1)):
        before = given.copy(deep=True)
        json.loads(figure(given).to_json())
        assert before.identical(given)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_name_is_never_markup(figure: Callable[[xr.Dataset], go.Figure]) -> None:
    given = trajectory()
    given.attrs |= {"model": "<a href='x'>a&b</a> %{y} $x$", "metric": "<b>F1</b> %{x}"}
    text = json.dumps(figure(given).to_dict(), default=lambda values: values.tolist())
    assert "&lt;a href='x'&gt;a&amp;b&lt;/a&gt; &#37;{y} &#36;x&#36;" in text
    assert "<a" not in text
    assert "<b>F1" not in text
    assert "F1</b> %{x}" not in text


def test_long_names_are_cut() -> None:
    assert escape("a" * 40 + "z" * 40, longest=20) == "a" * 10 + "…" + "z" * 9
    assert escape("short", longest=5) == "short"


def test_what_is_missing_is_said() -> None:
    with pytest.raises(UnderstudyError, match=r"the dataset has no graph, drop: it holds nothing\."):
        graph_figure(xr.Dataset())


def test_cells_meet_halfway() -> None:
    np.testing.assert_allclose(edges(np.array([1.0, 2.0, 4.0, 101.0])), [-0.2, 1.5, 3, 52.5, 105])
    np.testing.assert_allclose(edges(np.array([7.0])), [6.5, 7.5])


@pytest.mark.skipif(not can_export(), reason="kaleido or a Chromium to write images with is missing")
def test_images_are_written(tmp_path: Path) -> None:
    figure = depth_figure(trajectory())
    paths = [tmp_path / name for name in ("depth.svg", "depth.PDF", "depth.png")]
    assert export.save_all(dict.fromkeys(paths, figure)) == paths
    root = ElementTree.parse(paths[0]).getroot()
    assert root.tag.endswith("svg")
    assert float(root.attrib["width"]) == figure.layout.width
    assert "tiny" in "".join(root.itertext())
    assert paths[1].read_bytes().startswith(b"%PDF")
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_a_page_needs_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "can_export", lambda: False)
    figure = depth_figure(trajectory())
    page = save(figure, tmp_path / "depth.html").read_text(encoding="utf-8")
    assert '<script src="' not in page  # nothing is fetched
    assert page == save(figure, tmp_path / "again.html").read_text(encoding="utf-8")
    with pytest.raises(UnderstudyError, match=r'as svg by kaleido and a browser.*"understudy\[figures\]".*Chromium'):
        save(figure, tmp_path / "depth.svg")
    assert not (tmp_path / "depth.svg").exists()


def test_a_browser_that_is_not_there_is_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    chromium = pytest.importorskip("choreographer.browsers.chromium")
    monkeypatch.setattr(chromium, "get_chrome_download_path", lambda **_: None)
    monkeypatch.setattr(chromium, "get_old_chrome_download_path", lambda: None)
    assert not can_export()
    monkeypatch.setitem(sys.modules, "kaleido", None)
    assert not can_export()


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnderstudyError, match=r"says no known kind of figure: end it in \.svg, \.pdf, \.png or \.html"):
        save(go.Figure(), tmp_path / "figure.gif")
    with pytest.raises(UnderstudyError, match="is not there: make it first"):
        save(go.Figure(), tmp_path / "nowhere" / "figure.html")
