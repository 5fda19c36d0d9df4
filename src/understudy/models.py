"""load: a model by name. Bundled, from timm, from a local folder, from the hub, or the one you hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from understudy import bundled
from understudy.anatomy import anatomy
from understudy.errors import UnderstudyError

Head = Literal["classes", "masked", "next"]


def load(
    name: str | Path | nn.Module,
    *,
    head: Head | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> nn.Module:
    """Load a model, in evaluation mode and otherwise exactly as its library makes it.

    >>> import understudy as us
    >>> type(us.load("digits")).__name__
    'ViTForImageClassification'

    name: a bundled model (`digits`, `digits-12`, `stdlib`), `timm/<name>`, a local folder, a hub id, or a module.
    head: which head to load where the checkpoint does not say: "classes", "masked" or "next".
    revision: a branch, tag or commit on the hub.
    allow_pickle: weights load from safetensors; a pickle checkpoint only with this, and then without running code.
    """
    if isinstance(name, nn.Module):
        anatomy(name)
        return name
    text = str(name)
    if text.startswith("timm/"):
        return _from_timm(text)
    folder = bundled.folder(text) if text in bundled.NAMES else Path(text)
    if folder.is_dir():
        _refuse_pickle(folder, text, allow_pickle)
    model = _from_transformers(str(folder) if folder.is_dir() else text, text, head, revision, allow_pickle)
    anatomy(model)
    return model.eval()


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers from drawing bars and printing reports where it loads and saves weights."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _from_transformers(where: str, name: str, head: Head | None, revision: str | None, allow_pickle: bool) -> nn.Module:
    import transformers

    try:
        with quietly():
            config = transformers.AutoConfig.from_pretrained(where, revision=revision)
            kind = _model_class(config, name, head)
            model, report = kind.from_pretrained(
                where,
                revision=revision,
                # None takes whichever there is; a pickle is only ever read as plain weights.
                use_safetensors=None if allow_pickle else True,
                weights_only=True,
                output_loading_info=True,
            )
    except UnderstudyError:
        raise
    except Exception as problem:  # a config that contradicts itself, weights of another shape, no network, ...
        raise UnderstudyError(_not_loaded(name, problem)) from problem
    if missing := sorted(report["missing_keys"]):
        raise UnderstudyError(
            f"{name} has no weights for {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} of "
            f"{type(model).__name__}: they would be random. Choose the head that the checkpoint was trained with."
        )
    if name in bundled.NAMES:
        model.name_or_path = name  # a result says `digits`, not where the package happens to lie
    loaded: nn.Module = model
    return loaded


def _model_class(config: Any, name: str, head: Head | None) -> Any:
    import transformers

    if head is not None:
        if head not in ("classes", "masked", "next"):
            raise UnderstudyError(f"head={head!r} is not possible: choose 'classes', 'masked' or 'next'.")
        image = type(config) in transformers.AutoModelForImageClassification._model_mapping
        classes = (
            transformers.AutoModelForImageClassification if image else transformers.AutoModelForSequenceClassification
        )
        return {
            "classes": classes,
            "masked": transformers.AutoModelForMaskedLM,
            "next": transformers.AutoModelForCausalLM,
        }[head]
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise UnderstudyError(
            f"The config of {name} does not name a model class that transformers has ({', '.join(names) or 'none'}): "
            "say which head it was trained with, head='classes', 'masked' or 'next'."
        )
    return kind


def _from_timm(name: str) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as problem:
        raise UnderstudyError(f"{name} needs timm: pip install 'understudy[timm]' ({problem}).") from problem
    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        close = ", ".join(timm.list_models(f"*{short.split('.')[0]}*")[:5])
        raise UnderstudyError(f"timm has no model {short!r}." + (f" Close: {close}." if close else ""))
    try:
        model: nn.Module = timm.create_model(short, pretrained=True)
    except Exception as problem:
        raise UnderstudyError(_not_loaded(name, problem)) from problem
    model.name_or_path = name  # type: ignore[assignment]
    anatomy(model)
    return model.eval()


def _refuse_pickle(folder: Path, name: str, allow_pickle: bool) -> None:
    if not (folder / "config.json").is_file():
        raise UnderstudyError(f"{name} is a folder without config.json: it holds no model that transformers can load.")
    safe, pickles = list(folder.glob("*.safetensors")), sorted(folder.glob("pytorch_model*.bin"))
    if not safe and pickles and not allow_pickle:
        raise UnderstudyError(
            f"{name} has its weights only as a pickle ({pickles[0].name}), which can hold code. Convert them to "
            "safetensors, or ask for the pickle with allow_pickle=True (--allow-pickle); it is then read as plain "
            "weights (weights_only=True)."
        )


def _not_loaded(name: str, problem: Exception) -> str:
    first = " ".join(line.strip() for line in str(problem).strip().split("\n")[:3])
    if Path(name).is_dir():
        return f"{name} could not be loaded: {first}"
    return (
        f"{name!r} could not be loaded: it is no bundled model ({', '.join(bundled.NAMES)}), no local folder, "
        "and the hub could not be reached or has no such model with safetensors weights. Offline, give a local folder. "
        f"({first})"
    )
