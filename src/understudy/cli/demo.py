"""understudy demo: the bundled digits model, measured at every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.console import out, progress, verb
from understudy.cli.show import print_run, save_svg

EXAMPLES = """
**Examples**

`understudy demo`

`understudy demo --out somewhere --count 599`
"""


@verb
def demo(
    output: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("understudy-demo"),
    count: Annotated[int, typer.Option(help="How many held-out digits, up to 599.")] = 256,
) -> None:
    """Measure which heads of a small vision Transformer can stand in for which, on held-out digits."""
    from understudy.inputs.digits import digits
    from understudy.measurement import measure
    from understudy.models import load
    from understudy.organize.summary import summary

    store, table, picture = output / "digits.zarr", output / "summary.csv", output / "digits.svg"
    with progress("measuring digits") as report:
        run = measure(load("digits"), digits(count), layers="all", out=store, progress=report)
    example = str(run["input"].values[0])
    print_run(out, run, None, example)
    summary(run).to_csv(table, index_label="layer")
    save_svg(run, None, example, picture)
    out.print("wrote")
    for path, what in (
        (store, "the run; open it with understudy show, or xarray.open_zarr"),
        (table, "the table"),
        (picture, "this page as a picture"),
    ):
        out.print(f"  {path}  [dim]{what}[/]", highlight=False, soft_wrap=True)
