"""The application: its verbs, and what every one of them does about errors."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from understudy.cli import check, demo, measure, models, reproduce, route, show, train

app = typer.Typer(
    name="understudy",
    help="Measure which component of a Transformer can stand in for which, on each input.",
    epilog="Start with: understudy demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("measure", epilog=measure.EXAMPLES)(measure.measure)
app.command("show", epilog=show.EXAMPLES)(show.show)
app.command("reproduce", epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.add_typer(route.app, name="route")
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("models", epilog=models.EXAMPLES)(models.models)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"understudy {version('understudy')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Measure which component of a Transformer can stand in for which, on each input."""
