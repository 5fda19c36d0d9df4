"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy import bundled
from understudy.cli.console import err
from understudy.errors import UnderstudyError

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from torch import nn

    from understudy.inputs.batch import Inputs
    from understudy.models import Head

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A bundled model (digits, digits-12, stdlib), timm/NAME, a folder or a hub id."
    ),
]
HeadName = Annotated[
    str | None,
    typer.Option("--head", help="The head to load where the checkpoint does not say: classes, masked, next."),
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit on the hub.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read a pickle checkpoint, as plain weights.")]
Images = Annotated[Path | None, typer.Option(help="A folder of images.")]
Texts = Annotated[Path | None, typer.Option(help="A folder of .txt files, or a file of lines.")]
MaskedTexts = Annotated[Path | None, typer.Option(help="The same, with some tokens of each text masked.")]
Length = Annotated[int, typer.Option(help="Tokens of each text, at most.")]
Masks = Annotated[int, typer.Option(help="Tokens of each masked text that are masked.")]
Seed = Annotated[int, typer.Option(help="Which tokens are masked.")]
Count = Annotated[int | None, typer.Option(help="How many inputs; by default all (bundled: 64).")]

BUNDLED_COUNT = 64


def open_model(name: str, head: str | None, revision: str | None, allow_pickle: bool) -> nn.Module:
    """Load what the arguments name."""
    from understudy.models import load

    if head not in (None, "classes", "masked", "next"):
        raise UnderstudyError(f"--head {head} is not possible: choose classes, masked or next.")
    chosen: Head | None = head  # type: ignore[assignment]
    with err.status(f"loading {name}"):
        return load(name, head=chosen, revision=revision, allow_pickle=allow_pickle)


def open_inputs(
    name: str,
    model: nn.Module,
    *,
    images: Path | None,
    texts: Path | None,
    masked_texts: Path | None,
    count: int | None,
    length: int,
    masks: int,
    seed: int,
) -> Inputs:
    """The inputs that the arguments name, or those that a bundled model brings."""
    given = [option for option in (images, texts, masked_texts) if option is not None]
    if len(given) > 1:
        raise UnderstudyError("Give one of --images, --texts and --masked-texts.")
    if images is not None:
        from understudy.inputs.images import images as read_images

        return read_images(images, model, count=count)
    if texts is not None or masked_texts is not None:
        from understudy.inputs import texts as reader

        if texts is not None:
            return reader.texts(texts, model, length=length, count=count)
        assert masked_texts is not None
        return reader.masked_texts(masked_texts, model, masks=masks, seed=seed, length=length, count=count)
    if name not in bundled.NAMES:
        raise UnderstudyError(f"{name} brings no inputs of its own: give --images, --texts or --masked-texts.")
    return bundled_inputs(name, count)


def bundled_inputs(name: str, count: int | None = None) -> Inputs:
    """The held-out inputs that a bundled model brings."""
    from understudy.inputs.digits import digits
    from understudy.inputs.stdlib import stdlib

    return (stdlib if name == "stdlib" else digits)(BUNDLED_COUNT if count is None else count)
