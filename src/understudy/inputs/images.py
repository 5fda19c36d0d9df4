"""Images of a folder, as the model's own processor prepares them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from understudy import bundled
from understudy.anatomy import anatomy, family_key
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Bad, Batch, Inputs, checked_bad

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

_DECODED = 64  # images that are looked at together


def images(
    folder: str | Path,
    model: nn.Module,
    *,
    count: int | None = None,
    processor: Any | None = None,
    labels: Mapping[str, int] | None = None,
    bad: Bad = "refuse",
) -> Inputs:
    """The images below a folder, in the order of their paths, which are their ids.

    >>> import understudy as us
    >>> inputs = us.images("photos/", model)  # doctest: +SKIP

    Every image is decoded once at the start, so that a corrupt one shows before hours were spent; `bad` says whether
    it is refused or skipped and named in `Inputs.skipped`. `processor` is by default the one that belongs to the
    model's name: an image processor of transformers, or timm's evaluation transform. `labels` gives the class of each
    image by its id, where accuracy is asked for.
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
    if count is not None and not 1 <= count <= len(files):
        raise UnderstudyError(f"{count} images were asked for; {root} holds {len(files)}: ask for 1 to {len(files)}.")
    good, skipped = _readable(files, root, count, checked_bad(bad))
    files = list(good.values())
    if not files:
        raise UnderstudyError(f"None of the {len(skipped)} images in {root} can be read.")
    prepare = _prepare(body.model, processor)

    mode = _mode(body.model, processor)
    names = tuple(good)
    if labels is not None and (missing := [name for name in names if name not in labels]):
        raise UnderstudyError(f"{len(missing)} of {len(names)} images have no label, such as {missing[0]}.")

    def load(indices: Sequence[int]) -> Batch:
        batch = {"pixel_values": torch.stack([prepare(open_image(files[index], mode)) for index in indices])}
        if labels is not None:
            batch["labels"] = torch.tensor([labels[names[index]] for index in indices])
        return batch

    about: dict[str, str | int] = {"kind": "images", **({"skipped": len(skipped)} if skipped else {})}
    # How a picture is prepared belongs to what it is; where that cannot be told, the pixels themselves are looked at.
    told = _settings(body.model, processor)
    content = None if told is None else (lambda index: told + files[index].read_bytes())
    return Inputs(names, load, about, content, skipped)


def _readable(files: Sequence[Path], root: Path, count: int | None, bad: Bad) -> tuple[dict[str, Path], dict[str, str]]:
    """The first `count` files that decode, by name, and what is wrong with those before them that do not."""
    good: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), _DECODED):
            part = files[start : start + _DECODED]
            for path, problem in zip(part, pool.map(_problem, part), strict=True):
                if count is not None and len(good) == count:
                    return good, skipped
                name = path.relative_to(root).as_posix()
                if problem is None:
                    good[name] = path
                elif bad == "refuse":
                    raise UnderstudyError(
                        f"{path} cannot be read as an image: {problem}. Mend or remove it, or leave such files out "
                        "with bad='skip' (--skip-bad)."
                    )
                else:
                    skipped[name] = problem
    return good, skipped


def _problem(path: Path) -> str | None:
    try:
        open_image(path)
    except UnderstudyError as problem:
        return str(problem.__cause__)
    return None


def open_image(path: Path, mode: str = "RGB") -> Any:
    """A picture as Pillow decodes it, in colour or grey ("L")."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:  # as its decoders say it
        raise UnderstudyError(f"{path} cannot be read as an image: {problem}.") from problem


def _mode(model: nn.Module, processor: Any | None) -> str:
    """In which colours a picture is read: grey for a processor of one channel."""
    if processor is None and family_key(model) != "timm":
        processor = _processor(model)
    mean = getattr(processor, "image_mean", None)
    return "L" if isinstance(mean, list | tuple) and len(mean) == 1 else "RGB"


def _settings(model: nn.Module, processor: Any | None) -> bytes | None:
    if processor is None and family_key(model) != "timm":
        processor = _processor(model)
    if processor is not None and hasattr(processor, "to_dict"):
        return json.dumps(processor.to_dict(), sort_keys=True, default=str).encode()
    return None if processor is not None else repr(_prepare(model, None)).encode()


def _prepare(model: nn.Module, processor: Any | None) -> Any:
    if processor is None and family_key(model) == "timm":
        import timm.data

        return timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    if processor is None:
        processor = _processor(model)
    if not hasattr(processor, "preprocess"):  # a transform: image -> tensor
        return processor
    return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]


def _processor(model: nn.Module) -> Any:
    from transformers import AutoImageProcessor

    name = str(getattr(model, "name_or_path", ""))
    where = bundled.folder(name) if name in bundled.NAMES else name
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    try:
        return AutoImageProcessor.from_pretrained(where, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as problem:
        raise UnderstudyError(
            f"No image processor belongs to {name or type(model).__name__}: pass one with processor=..."
        ) from problem
