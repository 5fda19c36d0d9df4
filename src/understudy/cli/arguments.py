"""Options that several verbs share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy import bundled
from understudy.cli.console import err
from understudy.errors import UnderstudyError

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from torch import nn

    from understudy.inputs.batch import Bad, Inputs
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
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that the checkpoint brings. Never without this.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="auto: spread a model larger than one device over several, the CPU and the disk (accelerate)."),
]
OffloadFolder = Annotated[Path | None, typer.Option(help="Where --device-map keeps weights on disk.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out images and texts that cannot be read, and name them.")
]
Images = Annotated[Path | None, typer.Option(help="A folder of images.")]
Labels = Annotated[Path | None, typer.Option(help="The class of each image, lines of NAME,CLASS, for accuracy.")]
Texts = Annotated[Path | None, typer.Option(help="A folder of .txt files, or a file of lines.")]
MaskedTexts = Annotated[Path | None, typer.Option(help="The same, with some tokens of each text masked.")]
Length = Annotated[int, typer.Option(help="Tokens of each text, at most.")]
Masks = Annotated[int, typer.Option(help="Tokens of each masked text that are masked.")]
Units = Annotated[
    str,
    typer.Option(
        help="What is removed and rescaled: heads, kv (query heads that share keys and values) or neurons:N (blocks of "
        "the MLP's neurons)."
    ),
]
Seed = Annotated[int, typer.Option(help="Which tokens are masked.")]
Count = Annotated[int | None, typer.Option(help="How many inputs; by default all (bundled: 64).")]

BUNDLED_COUNT = 64


@dataclass(frozen=True)
class OpenModel:
    """The model that the arguments name; called, it loads it, here or on another machine."""

    name: str
    head: str | None = None
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    device_map: str | None = None
    offload_folder: Path | None = None

    def __call__(self) -> nn.Module:
        """Load it."""
        from understudy.models import load

        with err.status(f"loading {self.name}"):
            return load(
                self.name,
                head=self._head(),
                revision=self.revision,
                allow_pickle=self.allow_pickle,
                trust_remote_code=self.trust_remote_code,
                device_map=self.device_map,
                offload_folder=self.offload_folder,
            )

    def skeleton(self) -> nn.Module:
        """Its shapes, without weights."""
        from understudy.models import skeleton

        return skeleton(self.name, head=self._head(), revision=self.revision, trust_remote_code=self.trust_remote_code)

    def absolute(self) -> OpenModel:
        """The same for a process with another working directory."""
        there = Path(self.name)
        return replace(self, name=str(there.absolute())) if there.is_dir() and self.name not in bundled.NAMES else self

    def _head(self) -> Head | None:
        if self.head not in (None, "classes", "masked", "next"):
            raise UnderstudyError(f"--head {self.head} is not possible: choose classes, masked or next.")
        return self.head  # type: ignore[return-value]


@dataclass(frozen=True)
class OpenInputs:
    """The inputs that the arguments name, or those that a bundled model brings; called, it reads them."""

    name: str
    images: Path | None
    texts: Path | None
    masked_texts: Path | None
    count: int | None
    length: int
    masks: int
    seed: int
    skip_bad: bool
    labels: Path | None = None

    def __call__(self, model: nn.Module) -> Inputs:
        """Read them."""
        from understudy.inputs import images as pictures
        from understudy.inputs import texts as reader

        bad: Bad = "skip" if self.skip_bad else "refuse"
        if sum(option is not None for option in (self.images, self.texts, self.masked_texts)) > 1:
            raise UnderstudyError("Give one of --images, --texts and --masked-texts.")
        if self.images is not None:
            labels = None if self.labels is None else read_labels(self.labels)
            return pictures.images(self.images, model, count=self.count, labels=labels, bad=bad)
        if self.texts is not None:
            return reader.texts(self.texts, model, length=self.length, count=self.count, bad=bad)
        if self.masked_texts is not None:
            return reader.masked_texts(
                self.masked_texts,
                model,
                masks=self.masks,
                seed=self.seed,
                length=self.length,
                count=self.count,
                bad=bad,
            )
        if self.name not in bundled.NAMES:
            raise UnderstudyError(f"{self.name} brings no inputs of its own: give --images, --texts or --masked-texts.")
        return bundled_inputs(self.name, self.count)

    def absolute(self) -> OpenInputs:
        """The same for a process with another working directory."""
        images, texts, masked_texts = (
            None if path is None else path.absolute() for path in (self.images, self.texts, self.masked_texts)
        )
        return replace(self, images=images, texts=texts, masked_texts=masked_texts)


def read_labels(path: Path) -> dict[str, int]:
    """The class of each image, from a file of lines `NAME,CLASS`."""
    import csv

    if not path.is_file():
        raise UnderstudyError(f"{path} is not there: --labels takes a file of lines NAME,CLASS.")
    found = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        for number, row in enumerate(csv.reader(lines), 1):
            if len(row) != 2 or not row[1].strip().isdecimal():
                raise UnderstudyError(f"Line {number} of {path} is not NAME,CLASS with a number for the class: {row}.")
            found[row[0]] = int(row[1])
    return found


def bundled_inputs(name: str, count: int | None = None) -> Inputs:
    """The held-out inputs that a bundled model brings."""
    from understudy.inputs.digits import digits
    from understudy.inputs.stdlib import stdlib

    return (stdlib if name == "stdlib" else digits)(BUNDLED_COUNT if count is None else count)
