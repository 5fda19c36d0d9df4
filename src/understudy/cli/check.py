"""understudy check: the proof that the engine computes what the model computes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from understudy import bundled
from understudy.cli import arguments as given
from understudy.cli.console import FAILED, err, out, verb

EXAMPLES = """
**Examples**

`understudy check digits`

`understudy check ./my-llama --dtype float64`
"""


@verb
def check(
    model: given.ModelName,
    dtype: Annotated[str | None, typer.Option(help="Check in this precision: float32 or float64.")] = None,
    units: given.Units = "heads",
    head: given.HeadName = None,
    revision: given.Revision = None,
    allow_pickle: given.AllowPickle = False,
    trust_remote_code: given.TrustRemoteCode = False,
) -> None:
    """Compare the engine with the model's own full forward, at every layer."""
    from understudy.checks import check as run_check

    network = given.OpenModel(model, head, revision, allow_pickle, trust_remote_code)()
    inputs = given.bundled_inputs(model, 3) if model in bundled.NAMES else None
    with err.status("checking every layer"):
        results = run_check(network, inputs, units=units, dtype=dtype)
    table = Table(title=f"{model}: largest difference at each layer", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("dense = all gates one", justify="right")
    table.add_column("resumed = full forward", justify="right")
    table.add_column("site = bias + parts", justify="right")
    table.add_column("")
    for result in results:
        numbers = [f"{value:.1e}" for value in (result.dense, result.gated, result.parts)]
        table.add_row(str(result.layer), *numbers, "[green]ok[/]" if result.passed else "[bold red]beyond[/]")
    out.print(table)
    passed = all(result.passed for result in results)
    verdict = "every layer is within" if passed else "not every layer is within"
    out.print(f"{verdict} {results[0].tolerance:.0e}, relative to the largest value where that is above one")
    if not passed:
        raise typer.Exit(FAILED)
