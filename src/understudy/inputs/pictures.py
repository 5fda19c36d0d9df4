"""Labelled pictures: what a recipe trains a vision Transformer on, and what it holds out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs
from understudy.inputs.images import SUFFIXES, open_image

TRAINING = "train"
HELD_OUT = ("test", "val", "validation")  # in this order: where there are several, the first that has classes
KEPT = 2**30  # bytes of decoded pixels that are kept in memory
GREY = ("L", "1")  # Pillow's modes of one channel that RGB holds without loss


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of one size in classes, some to train on and some held out.

    The batches of both have `pixel_values`, `[pictures, channels, side, side]` within [-1, 1], and `labels`, which
    count `classes`. `about` tells the data on a model's card, `title` is what a model is "trained on", and
    `fingerprint` tells one folder from another of the same name.
    """

    name: str
    training: Inputs
    held_out: Inputs
    side: int  # pixels
    channels: int
    classes: tuple[str, ...]
    about: str
    title: str
    fingerprint: str | None = None

    def told(self) -> dict[str, str | int]:
        """What tells these pictures from others, for the record of a training run."""
        shape: dict[str, str | int] = {"data": self.name, "side": self.side, "pictures": len(self.training)}
        return {**shape, **({"fingerprint": self.fingerprint} if self.fingerprint is not None else {})}


def labelled_pictures(folder: str | Path, *, side: int, held_out: float = 0.1) -> Pictures:
    """The pictures of a folder that has one sub-folder for each class, `side` x `side` pixels large.

    >>> data = labelled_pictures("mnist/", side=28)  # doctest: +SKIP
    >>> data.held_out.batch([0])["pixel_values"].shape  # doctest: +SKIP
    torch.Size([1, 1, 28, 28])

    Where the folder has `train/` and one of `test/`, `val/` and `validation/`, these hold the class folders, and what
    is not in `train/` is held out. Otherwise the share `held_out` is, chosen by a hash of the path, so that a picture
    stays on its side whatever is added. Both are mixed over the classes: the first few are a fair sample of all.
    Pictures have one channel if all are grey, else three. They are decoded on first use, and kept if they fit.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UnderstudyError(f"{root} is not a folder: give a folder that has one sub-folder of pictures a class.")
    if not isinstance(side, int) or side < 1:
        raise UnderstudyError(f"side={side!r} is not possible: give the pixels of a side, 1 or more.")
    if not 0 < held_out < 1:
        raise UnderstudyError(f"held_out={held_out!r} is not possible: give a share between 0 and 1, such as 0.1.")
    other = next((root / name for name in HELD_OUT if (root / TRAINING).is_dir() and _folders(root / name)), None)
    if other is None:
        found = _found(root, root)
        unseen = {path: label for path, label in found.items() if _hash(path) < held_out}
        seen = {path: label for path, label in found.items() if path not in unseen}
        how = "by a hash of their path"
    else:
        seen, unseen = _found(root, root / TRAINING), _found(root, other)
        _same_classes(root / TRAINING, seen, other, unseen)
        how = f"by the folder {other.name}/"
    classes = tuple(sorted({*seen.values(), *unseen.values()}))
    _enough(root, seen, unseen, classes)

    everything = {**seen, **unseen}
    channels = 1 if all(_is_grey(root / path) for path in sorted(everything, key=_hash)) else 3
    keep = len(everything) * channels * side**2 < KEPT
    name = root.resolve().name

    def inputs(labels: Mapping[str, str], split: str) -> Inputs:
        ids = _mixed(labels)
        paths = [root / path for path in ids]
        pixels = _Pixels(paths, side, channels, keep)
        numbers = torch.tensor([classes.index(labels[path]) for path in ids])

        def load(indices: Sequence[int]) -> Batch:
            chosen = list(indices)
            # The sums of the image processor in the model's folder, in its order.
            return {"pixel_values": (pixels(chosen) / 255 - 0.5) / 0.5, "labels": numbers[chosen]}

        def content(index: int) -> bytes:
            return f"{side} {channels} {numbers[index]} ".encode() + paths[index].read_bytes()

        return Inputs(ids, load, {"kind": "pictures", "source": name, "side": side, "split": split}, content)

    about = (
        f"The {len(everything):,} pictures of the folder `{name}`, {side} x {side} pixels, "
        f"{'grey' if channels == 1 else 'in colour'}, in {len(classes)} classes: {len(seen):,} to train on, "
        f"{len(unseen):,} held out {how}."
    )
    return Pictures(
        name=name,
        training=inputs(seen, "training"),
        held_out=inputs(unseen, "held out"),
        side=side,
        channels=channels,
        classes=classes,
        about=about,
        title=f"the {len(classes)} classes of pictures of {name}",
        fingerprint=_fingerprint(root, everything),
    )


class _Pixels:
    """The pixels of some pictures: all decoded on first use and kept, or decoded whenever they are asked for."""

    def __init__(self, paths: Sequence[Path], side: int, channels: int, keep: bool) -> None:
        self.paths, self.side, self.channels, self.keep = paths, side, channels, keep
        self._kept: Tensor | None = None

    def __call__(self, indices: Sequence[int]) -> Tensor:
        if not self.keep:
            return self._decoded([self.paths[index] for index in indices])
        if self._kept is None:
            self._kept = self._decoded(self.paths)
        return self._kept[torch.tensor(indices, dtype=torch.long)]

    def __getstate__(self) -> dict[str, Any]:
        # A worker elsewhere decodes the pictures itself: a gigabyte in every message would cost more.
        return {**self.__dict__, "_kept": None}

    def _decoded(self, paths: Sequence[Path]) -> Tensor:
        pixels = torch.empty(len(paths), self.channels, self.side, self.side, dtype=torch.uint8)
        with ThreadPoolExecutor() as pool:
            for place, picture in enumerate(pool.map(self._picture, paths)):
                pixels[place] = picture
        return pixels

    def _picture(self, path: Path) -> Tensor:
        from PIL.Image import Resampling

        image = open_image(path, "L" if self.channels == 1 else "RGB")
        image = image.resize((self.side, self.side), Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).view(self.side, self.side, self.channels)
        return pixels.permute(2, 0, 1)  # [channels, side, side]


def _found(root: Path, place: Path) -> dict[str, str]:
    """The class of every picture below the class folders of `place`, by its path below `root`."""
    folders = _folders(place)
    if len(folders) < 2:
        held = ", ".join(folder.name for folder in folders) or "none"
        raise UnderstudyError(
            f"{place} needs one sub-folder of pictures for each of two classes or more, but its sub-folders are: "
            f"{held}. Give the folder that holds the class folders, or one with {TRAINING}/ and one of "
            f"{', '.join(f'{name}/' for name in HELD_OUT)} that hold them."
        )
    files = {folder: _pictures(folder) for folder in folders}
    empty = [folder for folder, paths in files.items() if not paths]
    if len(empty) == len(folders):
        raise UnderstudyError(f"There are no pictures in {place}: files ending in {', '.join(SUFFIXES)} are read.")
    if empty:
        raise UnderstudyError(
            f"The class {empty[0].name!r} has no pictures: {empty[0]} holds no file ending in {', '.join(SUFFIXES)}. "
            "Add some, or remove the folder."
        )
    return {path.relative_to(root).as_posix(): folder.name for folder, paths in files.items() for path in paths}


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def _same_classes(place: Path, seen: Mapping[str, str], other: Path, unseen: Mapping[str, str]) -> None:
    ours, theirs = set(seen.values()), set(unseen.values())
    if ours != theirs:
        lone = [(place, name) for name in sorted(ours - theirs)] + [(other, name) for name in sorted(theirs - ours)]
        where, name = lone[0]
        raise UnderstudyError(
            f"{place} and {other} must have the same classes, but {len(lone)} are in one of them alone, such as "
            f"{name!r} in {where.name}/. Give both the same sub-folders."
        )


def _enough(root: Path, seen: Mapping[str, str], unseen: Mapping[str, str], classes: Sequence[str]) -> None:
    """Every class can be learned, and what is held out can tell something about them."""
    if len(unseen) < len(classes):
        raise UnderstudyError(
            f"Of the {len(seen) + len(unseen)} pictures in {root} only {len(unseen)} are held out, fewer than its "
            f"{len(classes)} classes: give more pictures, a larger share held_out=..., or a folder with {TRAINING}/ "
            f"and {HELD_OUT[0]}/."
        )
    if untaught := sorted(set(classes) - set(seen.values())):
        raise UnderstudyError(
            f"Every picture of the class {untaught[0]!r} in {root} is held out, and none is left to train on: give "
            f"more pictures, a smaller share held_out=..., or a folder with {TRAINING}/ and {HELD_OUT[0]}/."
        )


def _is_grey(path: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(path) as image:  # reads the header alone
            return image.mode in GREY
    except Exception:
        open_image(path)  # says what is wrong with it
        raise


def _mixed(labels: Mapping[str, str]) -> tuple[str, ...]:
    """The paths in an order whose every beginning has the classes in the proportions of the whole."""
    places: list[tuple[float, float, str]] = []
    for name in set(labels.values()):
        paths = sorted((path for path, label in labels.items() if label == name), key=_hash)
        places += [((rank + 0.5) / len(paths), _hash(path), path) for rank, path in enumerate(paths)]
    return tuple(path for _, _, path in sorted(places))


def _hash(path: str) -> float:
    """A number from 0 to 1 that the path alone decides."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64


def _fingerprint(root: Path, paths: Iterable[str]) -> str:
    told = "".join(f"{path} {(root / path).stat().st_size}\n" for path in sorted(paths))
    return hashlib.sha256(told.encode()).hexdigest()[:16]
