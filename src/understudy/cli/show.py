"""understudy show: a run on the console, or as a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from understudy.cli.console import out, verb
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    import xarray as xr

EXAMPLES = """
**Examples**

`understudy show digits.zarr`

`understudy show digits.zarr --layer 3 --input digit-0042 --svg layer-3.svg`
"""

# Rich's own template loads fonts from the network; a picture should not.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


@verb
def show(
    run: Annotated[Path, typer.Argument(help="A run that `understudy measure --out` wrote.")],
    layer: Annotated[int | None, typer.Option(help="The layer of the matrix; by default the last measured.")] = None,
    input: Annotated[str | None, typer.Option(help="Show the matrix of this input, too.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write what is shown as a picture, too.")] = None,
) -> None:
    """Show a run: how it was made, its summary, and who stands in for whom at one layer."""
    from understudy.store import open_run

    opened = open_run(run)
    if not opened.sizes["input"]:
        raise UnderstudyError(f"No input of {run} is done yet, of {opened.attrs['asked']}: look again later.")
    print_run(out, opened, layer, input)
    if svg is not None:
        save_svg(opened, layer, input, svg)
        out.print(f"wrote {svg}", highlight=False, soft_wrap=True)


def print_run(console: Console, run: xr.Dataset, layer: int | None, input: str | None) -> None:
    """Print a run on a console."""
    from understudy.cli.tables import matrix_table, provenance, summary_table

    layers = [int(value) for value in run["layer"].values]
    chosen = layers[-1] if layer is None else layer
    if chosen not in layers:
        raise UnderstudyError(f"Layer {chosen} is not in this run: it has {', '.join(map(str, layers))}.")
    ids = [str(value) for value in run["input"].values]
    if input is not None and input not in ids:
        raise UnderstudyError(f"Input {input!r} is not in this run: it has {len(ids)}, such as {', '.join(ids[:3])}.")
    console.print(provenance(run), "")
    console.print(summary_table(run), "")
    console.print(matrix_table(run, chosen))
    if input is not None:
        console.print("", matrix_table(run, chosen, input))


def save_svg(run: xr.Dataset, layer: int | None, input: str | None, path: Path) -> None:
    """Write what `print_run` prints as an SVG picture that needs no network."""
    from io import StringIO

    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    console = Console(record=True, width=92, file=StringIO(), force_terminal=True, color_system="truecolor")
    print_run(console, run, layer, input)
    console.save_svg(str(path), theme=DEFAULT_TERMINAL_THEME, code_format=_SVG, unique_id="run")
