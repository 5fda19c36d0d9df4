"""Figures as files: vector and pixel images through a browser, and self-contained pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import plotly.graph_objects as go

from understudy.errors import UnderstudyError

IMAGES = (".svg", ".pdf", ".png")
PIXELS = 2.5  # a PNG's pixels for each px of the layout: 240 an inch on a page


def save(figure: go.Figure, path: str | Path) -> Path:
    """Write a figure to a file of the kind its name says, in the figure's own size, and return the path.

    `.svg`, `.pdf` and `.png` need kaleido and a Chromium; `.html` is one self-contained page and needs neither. A file
    that is there is replaced.
    """
    (written,) = save_all({Path(path): figure})
    return written


def save_all(figures: Mapping[Path, go.Figure]) -> list[Path]:
    """Write several figures as `save` does, by their paths; a browser is started once for all of them."""
    for path in figures:
        if path.suffix.lower() not in (*IMAGES, ".html"):
            raise UnderstudyError(
                f"{str(path)!r} says no known kind of figure: end it in {', '.join(IMAGES)} or .html."
            )
        if not path.parent.is_dir():
            raise UnderstudyError(f"The folder {str(path.parent)!r} is not there: make it first.")
    for path, figure in figures.items():
        if path.suffix.lower() == ".html":
            path.write_text(figure.to_html(include_plotlyjs=True, div_id="figure"), encoding="utf-8")
    images = {path: figure for path, figure in figures.items() if path.suffix.lower() in IMAGES}
    if images:
        _render(images)
    return list(figures)


def can_export() -> bool:
    """Return whether kaleido and a browser are there, so that images can be written; neither is started."""
    try:
        import kaleido  # noqa: F401
        from choreographer.browsers.chromium import Chromium
    except ImportError:
        return False
    found = Chromium.find_browser(skip_local=False)
    return found is not None and Path(found).is_file()


def _render(images: Mapping[Path, go.Figure]) -> None:
    kinds = {path: path.suffix.lower().removeprefix(".") for path in images}
    if not can_export():
        raise UnderstudyError(
            f"A figure is written as {next(iter(kinds.values()))} by kaleido and a browser, and one of them is "
            'missing: pip install "understudy[figures]" and install Chromium or Chrome, or write .html, which needs '
            "neither."
        )
    import kaleido

    jobs = []
    for path, figure in images.items():
        size = {"width": figure.layout.width or 700, "height": figure.layout.height or 500}
        size["scale"] = PIXELS if kinds[path] == "png" else 1
        jobs.append({"fig": figure.to_dict(), "path": str(path), "opts": {"format": kinds[path], **size}})
    # No figure holds mathematics, and without MathJax nothing is fetched from the net.
    kaleido.write_fig_from_object_sync(jobs, cancel_on_error=True, kopts={"mathjax": False})
