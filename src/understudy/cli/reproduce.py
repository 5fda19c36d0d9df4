"""understudy reproduce: a study of the paper, here."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from understudy import bundled
from understudy.cli import arguments as given
from understudy.cli.console import out, progress, verb
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    import pandas as pd

    from understudy.inputs.batch import Inputs
    from understudy.meter import Progress

EXAMPLES = """
**Examples**

`understudy reproduce`

`understudy reproduce table1`

`understudy reproduce table2 --model ./my-vit --images photos/ --count 64`

`understudy reproduce table2 --scale paper --images imagenet-val/`
"""


@verb
def reproduce(
    name: Annotated[str | None, typer.Argument(help="The study; without it, all are listed.")] = None,
    scale: Annotated[str, typer.Option(help="mini: the bundled models; paper: the paper's model and counts.")] = "mini",
    model: Annotated[str | None, typer.Option(help="The same analysis on a model of yours.")] = None,
    images: given.Images = None,
    labels: given.Labels = None,
    texts: given.Texts = None,
    masked_texts: given.MaskedTexts = None,
    count: given.Count = None,
    length: given.Length = 128,
    masks: given.Masks = 8,
    seed: given.Seed = 0,
    skip_bad: given.SkipBad = False,
    head: given.HeadName = None,
    output: Annotated[Path, typer.Option("--out", help="The folder for tables and findings.")] = Path(
        "understudy-reproduce"
    ),
) -> None:
    """Run a study of the paper: our figures beside its figures, and which of its findings hold here."""
    from understudy.reproduce import STUDIES, study
    from understudy.reproduce.study import Setting

    if name is None:
        for each in STUDIES.values():
            out.print(f"[bold]{each.name}[/]  {each.title}", highlight=False)
            for size, needs in each.needs.items():
                out.print(f"    {size}: {needs}", highlight=False, style="dim")
        return
    chosen = study(name)
    where = chosen.model(scale) if model is None else model
    chosen.model(scale)  # a scale that is not there is refused, whatever the model
    if labels is not None and images is None:
        raise UnderstudyError("--labels are for --images.")
    if count is not None and count < 2:
        raise UnderstudyError(f"A study needs at least 2 inputs, but --count {count} was given.")
    own = model is not None or any(option is not None for option in (images, texts, masked_texts))
    if not own or scale == "paper":
        out.print(f"{chosen.title}\nneeds: {chosen.needs[scale]}", highlight=False)
    if where not in bundled.NAMES and images is None and texts is None and masked_texts is None:
        raise UnderstudyError(f"{where} brings no inputs of its own: give --images, --texts or --masked-texts.")
    network = given.OpenModel(where, head)()

    def inputs(number: int) -> Inputs:
        asked = count if count is not None else number
        opened = given.OpenInputs(where, images, texts, masked_texts, None, length, masks, seed, skip_bad, labels)
        if where in bundled.NAMES and not own:
            return given.bundled_inputs(where, asked)
        everything = opened(network)
        if count is None and len(everything) < number:
            out.print(f"the study takes {number} inputs; here are {len(everything)}", highlight=False)
        if len(everything) < 2:
            raise UnderstudyError("A study needs at least 2 inputs, but here is 1.")
        return everything.take(range(min(asked, len(everything))))

    with _bars() as bar:
        report = chosen.run(Setting(scale, network, inputs, own, bar))
    for title, table in report.tables.items():
        out.print(_printed(title, table))
    for key, text in report.about.items():
        if isinstance(text, str):
            out.print(f"{key}: {text}", highlight=False)
    for finding in report.findings:
        marks = {True: "[green]holds[/]", False: "[bold red]does not hold[/]", None: "[yellow]cannot be said[/]"}
        mark = marks[finding.holds]
        out.print(f"{mark}  {finding.claim} ({finding.figures})", highlight=False)
    folder = output / chosen.name / where.strip("./").replace("/", "--")
    said = {"study": chosen.name, "scale": scale, "model": where, "understudy": version("understudy")}
    for path in replace(report, about={**said, **report.about}).save(folder):
        out.print(f"wrote {path}", highlight=False, soft_wrap=True, style="dim")


class _bars:
    """One bar after the other, each with the name of its step."""

    def __init__(self) -> None:
        from contextlib import ExitStack

        self._stack = ExitStack()

    def __enter__(self) -> _bars:
        return self

    def __call__(self, step: str) -> Progress:
        self._stack.close()
        return self._stack.enter_context(progress(step))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _printed(heading: str, frame: pd.DataFrame) -> Table:
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    # Intervals stand below their figure; counts, and differences that the paper does not give, are in the files.
    hidden = [f"{c}_gap" for c in ("S", "kl") if f"{c}_gap_paper" not in frame.columns]
    hidden += ["sources", "unfitted", "left_out", "correct_paper"]
    shown = [c for c in frame.columns if not str(c).endswith(("_low", "_high")) and c not in hidden]
    flat = frame.reset_index()
    index = [name for name in flat.columns if name not in frame.columns]
    for name in [*index, *shown]:
        title = str(name).replace("_", " ")
        table.add_column(title, justify="left" if name in index else "right", no_wrap=name in index)
    for _, row in flat.iterrows():
        cells = [str(row[name]) for name in index]
        for name in shown:
            text = _number(row[name])
            if f"{name}_low" in frame.columns:
                text += f"\n[dim]{_number(row[f'{name}_low'])}..{_number(row[f'{name}_high'])}[/]"
            cells.append(text)
        table.add_row(*cells)
    return table


def _number(value: object) -> str:
    if isinstance(value, float):
        if value != value:
            return "-"
        if value.is_integer() and abs(value) >= 2:
            return f"{value:.0f}"
        return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    return str(value)
