"""load: a model by name. Bundled, from timm, from a local folder, from the hub, or the one you hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, str | int] | None = None,
    offload_folder: str | Path | None = None,
) -> nn.Module:
    """Load a model, in evaluation mode and otherwise exactly as its library makes it.

    >>> import understudy as us
    >>> type(us.load("digits")).__name__
    'ViTForImageClassification'

    name: a bundled model (`digits`, `digits-12`, `stdlib`), `timm/<name>`, a local folder, a hub id, or a module.
    head: which head to load where the checkpoint does not say: "classes", "masked" or "next".
    revision: a branch, tag or commit on the hub.
    allow_pickle: weights load from safetensors; a pickle checkpoint only with this, and then without running code.
    trust_remote_code: run the code that a checkpoint brings; never without this.
    device_map: spread a model that is larger than one device over several, the CPU and the disk: "auto", or a mapping
        (needs accelerate). offload_folder: where weights go that stay on disk.
    """
    if isinstance(name, nn.Module):
        anatomy(name)
        return name
    text = str(name)
    if text.startswith("timm/"):
        return _from_timm(text)
    source = _Source(text, head, revision, allow_pickle, trust_remote_code)
    model = source.load(device_map=device_map, offload_folder=offload_folder)
    anatomy(model)
    return model.eval()


def skeleton(
    name: str, *, head: Head | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """A model's shapes without its weights, on the meta device: what a plan needs."""
    if name.startswith("timm/"):
        return _from_timm(name, weights=False)
    return _Source(name, head, revision, True, trust_remote_code).skeleton().eval()


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


@dataclass(frozen=True)
class _Source:
    """A checkpoint that transformers reads, and what may be done with it."""

    name: str
    head: Head | None
    revision: str | None
    allow_pickle: bool
    trust_remote_code: bool

    def load(self, **placement: Any) -> nn.Module:
        """The model with its weights."""
        placement = {key: value for key, value in placement.items() if value is not None}
        with self._problems_said():
            _, kind = self._class()
            model, report = kind.from_pretrained(
                self._where(),
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                # None takes whichever there is; a pickle is only ever read as plain weights.
                use_safetensors=None if self.allow_pickle else True,
                weights_only=True,
                output_loading_info=True,
                **placement,
            )
        if missing := sorted(report["missing_keys"]):
            raise UnderstudyError(
                f"{self.name} has no weights for {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} of "
                f"{type(model).__name__}: they would be random. Choose the head that the checkpoint was trained with."
            )
        return self._named(model)

    def skeleton(self) -> nn.Module:
        """The model on the meta device."""
        import torch

        with self._problems_said():
            config, kind = self._class()
            with torch.device("meta"):
                # An Auto class builds from a config by another name than a model class.
                model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        return self._named(model)

    def _class(self) -> tuple[Any, Any]:
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            self._where(), revision=self.revision, trust_remote_code=self.trust_remote_code
        )
        return config, _model_class(config, self.name, self.head)

    def _where(self) -> str:
        folder = bundled.folder(self.name) if self.name in bundled.NAMES else Path(self.name)
        if not folder.is_dir():
            return self.name
        _refuse_pickle(folder, self.name, self.allow_pickle)
        return str(folder)

    def _named(self, model: Any) -> nn.Module:
        # A result says `digits`, not where the package happens to lie.
        model.name_or_path = self.name if self.name in bundled.NAMES else model.name_or_path or self.name
        named: nn.Module = model
        return named

    @contextmanager
    def _problems_said(self) -> Iterator[None]:
        try:
            with quietly():
                yield
        except UnderstudyError:
            raise
        except Exception as problem:  # a config that contradicts itself, weights of another shape, no network, ...
            raise UnderstudyError(_not_loaded(self.name, problem)) from problem


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


def _from_timm(name: str, *, weights: bool = True) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as problem:
        raise UnderstudyError(f"{name} needs timm: pip install 'understudy[timm]' ({problem}).") from problem
    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        close = ", ".join(timm.list_models(f"*{short.split('.')[0]}*")[:5])
        raise UnderstudyError(f"timm has no model {short!r}." + (f" Close: {close}." if close else ""))
    try:
        model: nn.Module = timm.create_model(short, pretrained=weights)
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
