"""The models that ship with the package, one folder each, written by `understudy train`."""

from __future__ import annotations

from pathlib import Path

from understudy.errors import UnderstudyError

NAMES = ("digits", "digits-12", "stdlib")


def folder(name: str) -> Path:
    """The folder of a bundled model, in the format that `from_pretrained` reads.

    >>> folder("digits").name
    'digits'
    """
    if name not in NAMES:
        raise UnderstudyError(f"No model {name!r} is bundled; the bundled models are {', '.join(NAMES)}.")
    path = Path(__file__).parent / name
    if not (path / "config.json").is_file():
        raise UnderstudyError(
            f"The bundled model {name!r} is missing from {path}: reinstall understudy, "
            f"or make it again with `understudy train {name} --out {path}`."
        )
    return path
