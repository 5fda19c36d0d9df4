"""understudy reproduce: a study of the paper, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy import bundled
from understudy.cli import arguments as given
from understudy.cli.console import bars, out, verb
from understudy.cli.findings import show
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from understudy.inputs.batch import Inputs
    from understudy.reproduce.many import ManyStudy
    from understudy.reproduce.study import Report, Study

EXAMPLES = """
**Examples**

`understudy reproduce`

`understudy reproduce table1`

`understudy reproduce table2 --model ./my-vit --images photos/ --count 64`

`understudy reproduce table2 --scale paper --images imagenet-val/`

`understudy reproduce table4 --seeds 3`
"""


@verb
def reproduce(
    name: Annotated[str | None, typer.Argument(help="The study; without it, all are listed.")] = None,
    scale: Annotated[str, typer.Option(help="mini: what runs here; paper: the paper's models and counts.")] = "mini",
    model: Annotated[str | None, typer.Option(help="The same analysis on a model of yours.")] = None,
    images: given.Images = None,
    labels: given.Labels = None,
    texts: given.Texts = None,
    masked_texts: given.MaskedTexts = None,
    count: given.Count = None,
    length: Annotated[int | None, typer.Option(help="Tokens of each text, at most (128).")] = None,
    masks: Annotated[int | None, typer.Option(help="Tokens of each masked text that are masked (8).")] = None,
    seed: Annotated[int | None, typer.Option(help="Which tokens are masked (0).")] = None,
    skip_bad: given.SkipBad = False,
    head: given.HeadName = None,
    seeds: Annotated[int | None, typer.Option(help="How often each model is trained, for the spread (1).")] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="What to train on: a folder of .txt files, a file of lines, stdlib, or hub:NAME:CONFIG."),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Only one family of table3.")] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="A folder of saved checkpoints, for figure2.")] = None,
    engine: Annotated[str | None, typer.Option(help="local, or ray: shards spread over a cluster (local).")] = None,
    output: Annotated[Path, typer.Option("--out", help="The folder for models, runs, tables and findings.")] = Path(
        "understudy-reproduce"
    ),
) -> None:
    """Run a study of the paper: our figures beside its figures, and which of its findings hold here."""
    from understudy.reproduce import STUDIES, study
    from understudy.reproduce.study import Study, checked

    if name is None:
        for each in STUDIES.values():
            out.print(f"[bold]{each.name}[/]  {each.title}", highlight=False)
            for size, needs in each.needs.items():
                out.print(f"    {size}: {needs}", highlight=False, style="dim")
        return
    chosen = study(name)
    options: dict[str, Any] = {"model": model, "images": images, "labels": labels, "texts": texts}
    options |= {"masked_texts": masked_texts, "count": count, "length": length, "masks": masks, "seed": seed}
    options |= {"skip_bad": skip_bad or None, "head": head, "seeds": seeds, "corpus": corpus, "family": family}
    options |= {"checkpoints": checkpoints, "engine": engine}
    checked(chosen, scale, options)
    _writable(output)
    if labels is not None and images is None:
        raise UnderstudyError("--labels are for --images.")
    if seeds is not None and seeds < 1:
        raise UnderstudyError(f"--seeds {seeds} is not possible: give how often each model is trained, 1 or more.")
    if count is not None and count < 2:
        raise UnderstudyError(f"A study needs at least 2 inputs, but --count {count} was given.")
    if isinstance(chosen, Study):
        named = chosen.models[scale] if model is None else model
        settings = (length or 128, masks or 8, seed or 0)
        opened = given.OpenInputs(named, images, texts, masked_texts, None, *settings, skip_bad, labels)
        where = named
        folder = _folder(output, chosen.name, where)
        report = _of_one(chosen, scale, opened, head, count, own=model is not None, folder=folder)
    else:
        where = scale
        folder = _folder(output, chosen.name, where)
        report = _of_many(chosen, scale, options, output)
    show(report)
    said = {"study": chosen.name, "scale": scale, "model": where, "understudy": version("understudy")}
    for path in replace(report, about={**said, **report.about}).save(folder):
        out.print(f"wrote {path}", highlight=False, soft_wrap=True, style="dim")


def _of_one(
    chosen: Study, scale: str, opened: given.OpenInputs, head: str | None, count: int | None, *, own: bool, folder: Path
) -> Report:
    """Run a study of one model: the scale's, or the user's."""
    from understudy.reproduce.study import Setting

    where = opened.name
    brought = any(option is not None for option in (opened.images, opened.texts, opened.masked_texts))
    own = own or brought
    if not own or scale == "paper":
        out.print(f"{chosen.title}\nneeds: {chosen.needs[scale]}", highlight=False)
    if where not in bundled.NAMES and not brought:
        raise UnderstudyError(f"{where} brings no inputs of its own: give --images, --texts or --masked-texts.")
    network = given.OpenModel(where, head)()

    def inputs(number: int) -> Inputs:
        asked = count if count is not None else number
        if where in bundled.NAMES and not own:
            return given.bundled_inputs(where, asked)
        everything = opened(network)
        if count is None and len(everything) < number:
            out.print(f"the study takes {number} inputs; here are {len(everything)}", highlight=False)
        if len(everything) < 2:
            raise UnderstudyError("A study needs at least 2 inputs, but here is 1.")
        return everything.take(range(min(asked, len(everything))))

    with bars() as bar:
        return chosen.run(Setting(scale, network, inputs, own, bar, count, folder))


def _of_many(chosen: ManyStudy, scale: str, options: Mapping[str, Any], output: Path) -> Report:
    """Run a study over many models, which keeps what it makes in the folder and goes on from there."""
    from understudy.reproduce.many import ManySetting

    out.print(f"{chosen.title}\nneeds: {chosen.needs[scale]}", highlight=False)
    taken = {name: value for name, value in options.items() if value is not None}
    if "labels" in taken:
        taken["labels"] = given.read_labels(taken["labels"])
    with bars() as bar:
        return chosen.run(ManySetting(scale, output, **taken, progress=bar))


def _folder(output: Path, study: str, where: str) -> Path:
    """Where a study's results go: a folder for each model or scale."""
    return output / study / where.strip("./").replace("/", "--")


def _writable(folder: Path) -> None:
    """See that a folder can be written into, before anything is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise UnderstudyError(f"--out {folder} cannot be written into: {problem.strerror or problem}.") from problem
