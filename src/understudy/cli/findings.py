"""How a study's report is printed: our figures beside the paper's, and which findings hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from understudy.cli.console import out

if TYPE_CHECKING:
    import pandas as pd

    from understudy.reproduce.study import Report

WIDE = 8  # columns
MARKS = {True: "[green]holds[/]", False: "[bold red]does not hold[/]", None: "[yellow]unresolved[/]"}


def show(report: Report) -> None:
    """Print a report."""
    for title, table in report.tables.items():
        out.print(printed(title, table))
    for key, text in report.about.items():
        if isinstance(text, str):
            out.print(f"{key}: {escape(text)}", highlight=False)
    for finding in report.findings:
        out.print(f"{MARKS[finding.holds]}  {escape(finding.claim)} ({escape(finding.figures)})", highlight=False)


def printed(heading: str, frame: pd.DataFrame) -> Table:
    """A table of figures, with intervals below and the paper's beside them."""
    look = box.SIMPLE_HEAD
    table = Table(
        title=escape(heading), title_justify="left", box=look, padding=(0, 1), collapse_padding=True, pad_edge=False
    )
    # Intervals stand below their figure; counts, and differences that the paper does not give, are in the files.
    hidden = [f"{c}_gap" for c in ("S", "kl") if f"{c}_gap_paper" not in frame.columns]
    hidden += ["sources", "unfitted", "left_out", "correct_paper", "seeds", "heads", "valid"]
    shown = [str(c) for c in frame.columns if not str(c).endswith(("_low", "_high")) and c not in hidden]
    stacked = len(shown) > WIDE  # the paper's figures below ours, where there is no room beside them
    if stacked:
        table.caption, table.caption_justify = "in brackets: the paper's", "left"
        shown = [name for name in shown if not name.endswith("_paper")]
    flat = frame.reset_index()
    index = [name for name in flat.columns if name not in frame.columns]
    for name in [*index, *shown]:
        title = str(name).replace("_", " ")
        table.add_column(title, justify="left" if name in index else "right", overflow="fold")
    for _, row in flat.astype(object).iterrows():  # whole numbers stay whole
        cells = [escape(str(row[name])) for name in index]
        for name in shown:
            text = _size(int(row[name])) if name == "parameters" else _number(row[name])
            if f"{name}_low" in frame.columns:
                ends = "..\n" if stacked else ".."
                text += f"\n[dim]{_end(row[f'{name}_low'])}{ends}{_end(row[f'{name}_high'])}[/]"
            if stacked and f"{name}_paper" in frame.columns:
                text += f"\n[cyan]({_number(row[f'{name}_paper'])})[/]"
            cells.append(text)
        table.add_row(*cells)
    return table


def _size(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _end(value: float) -> str:
    """An end of an interval: a digit less than its figure."""
    return f"{value:.3f}" if abs(value) >= 1e-2 or value != value or value == 0 else f"{value:.1e}"


def _number(value: object) -> str:
    if isinstance(value, float):
        if value != value:
            return "-"
        if value.is_integer() and abs(value) >= 2:
            return f"{value:.0f}"
        return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    return str(value)
