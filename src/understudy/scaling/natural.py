"""Natural families: pretrained models of one kind in several sizes, each family with its protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import nn

from understudy.inputs.batch import Inputs
from understudy.inputs.corpus import HubTexts
from understudy.inputs.texts import Source, masked_texts, texts
from understudy.meter import Progress
from understudy.models import Head, load
from understudy.scaling.family import Member, SharedProtocol
from understudy.worker import Layers


@dataclass(frozen=True)
class Natural:
    """A pretrained family, from small to large.

    models: the name that `load` takes, for each size. measured, scored: how many inputs CFS and the task metric take;
    the first of the same ones. data: where texts come from unless the user gives some; None: pictures, the user's.
    allow_pickle: the hub has some sizes as pickles alone, which are then read as plain weights.
    """

    name: str
    models: Mapping[str, str]
    head: Head | None
    measured: int
    scored: int
    layers: Layers
    search: str
    data: str | None = None
    allow_pickle: bool = False
    device_map: str | None = None

    def members(self) -> list[Member]:
        """Its models, opened when they are needed."""
        return [Member(f"{self.name}-{size}", partial(self._open, name)) for size, name in self.models.items()]

    def protocol(self, everything: Callable[[nn.Module], Inputs]) -> SharedProtocol:
        """What every member is asked, on the first of the inputs that `everything` makes for a model."""

        def first(count: int, model: nn.Module) -> Inputs:
            inputs = everything(model)
            return inputs.take(range(min(count, len(inputs))))

        return SharedProtocol(partial(first, self.measured), partial(first, self.scored), self.layers, self.search)

    def read(self, model: nn.Module, source: Source | None) -> Inputs:
        """The family's texts, or the user's, for a model; masked where it predicts masked tokens."""
        assert source is not None or self.data is not None
        given = source if source is not None else list(_hub_texts(str(self.data), self.scored))
        if self.head == "masked":
            return masked_texts(given, model, masks=8, length=128, bad="skip")
        return texts(given, model, length=128, bad="skip")

    def _open(self, name: str, _progress: Progress | None) -> nn.Module:
        return load(name, head=self.head, allow_pickle=self.allow_pickle, device_map=self.device_map)


@lru_cache(maxsize=4)
def _hub_texts(data: str, count: int) -> tuple[str, ...]:
    """The first different texts of a data set, read once for all models."""
    seen: dict[str, None] = {}
    for text in HubTexts.of(data):
        seen.setdefault(text)
        if len(seen) == count:
            break
    return tuple(seen)


VIT = Natural(
    "vit",
    {
        size: f"timm/vit_{size}_patch16_224.augreg_in21k_ft_in1k" for size in ("tiny", "small", "base", "large")
    },
    head=None,
    measured=512,
    scored=512,
    layers="last",
    search="grid:31",
)  # fmt: skip

BERT = Natural(
    "bert",
    {
        "tiny": "google/bert_uncased_L-2_H-128_A-2",
        "small": "google/bert_uncased_L-4_H-512_A-8",
        "base": "google-bert/bert-base-uncased",
        "large": "google-bert/bert-large-uncased",
    },
    head="masked",
    measured=32,
    scored=512,
    layers="last",
    search="grid:16",
    data="hub:nyu-mll/glue:mnli:validation_matched:premise",
    allow_pickle=True,
)

QWEN = Natural(
    "qwen2.5",
    {size: f"Qwen/Qwen2.5-{size}" for size in ("1.5B", "3B", "7B", "14B")},
    head="next",
    measured=32,
    scored=512,
    layers="quarters",
    search="grid:16",
    data="hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    device_map="auto",
)

NATURAL = {family.name: family for family in (VIT, BERT, QWEN)}
