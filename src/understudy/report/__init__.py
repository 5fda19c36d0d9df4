"""Pictures of results: pure functions of a dataset that return plotly figures, and how to save them."""

from understudy.report.depth import depth_figure
from understudy.report.draw import draw_graph, strongest_edges
from understudy.report.export import can_export, save
from understudy.report.formation import formation
from understudy.report.graphs import graph_figure
from understudy.report.trajectory import trajectory_figure

__all__ = [
    "can_export",
    "depth_figure",
    "draw_graph",
    "formation",
    "graph_figure",
    "save",
    "strongest_edges",
    "trajectory_figure",
]
