"""Images of a folder, as the model's own processor prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from understudy import bundled
from understudy.anatomy import anatomy, family_key
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def images(folder: str | Path, model: nn.Module, *, count: int | None = None, processor: Any | None = None) -> Inputs:
    """The images below a folder, in the order of their paths, which are their ids.

    >>> import understudy as us
    >>> inputs = us.images("photos/", model)  # doctest: +SKIP

    Images are read when they are measured. `processor` is by default the one that belongs to the model's name: an
    image processor of transformers, or timm's evaluation transform.
    """
    body = anatomy(model)
    if body.reads_text:
        raise UnderstudyError(f"{body.name} reads text, not images: give texts(...) or masked_texts(...).")
    root = Path(folder)
    if not root.is_dir():
        raise UnderstudyError(f"{root} is not a folder: give a folder that holds images.")
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UnderstudyError(f"There are no images in {root}: files ending in {', '.join(SUFFIXES)} are read.")
    if count is not None:
        if not 1 <= count <= len(files):
            raise UnderstudyError(
                f"{count} images were asked for; {root} holds {len(files)}: ask for 1 to {len(files)}."
            )
        files = files[:count]
    prepare = _prepare(body.model, processor)

    def load(indices: Sequence[int]) -> Batch:
        return {"pixel_values": torch.stack([prepare(_open(files[index])) for index in indices])}

    names = tuple(path.relative_to(root).as_posix() for path in files)
    return Inputs(names, load, {"kind": "images"}, lambda index: files[index].read_bytes())


def _open(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as problem:
        raise UnderstudyError(f"{path} cannot be read as an image: {problem}.") from problem


def _prepare(model: nn.Module, processor: Any | None) -> Any:
    if processor is None and family_key(model) == "timm":
        import timm.data

        return timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    if processor is None:
        from transformers import AutoImageProcessor

        name = str(getattr(model, "name_or_path", ""))
        try:
            processor = AutoImageProcessor.from_pretrained(bundled.folder(name) if name in bundled.NAMES else name)
        except (OSError, ValueError, ImportError) as problem:
            raise UnderstudyError(
                f"No image processor belongs to {name or type(model).__name__}: pass one with processor=..."
            ) from problem
    if not hasattr(processor, "preprocess"):  # a transform: image -> tensor
        return processor
    return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]
