"""The recipe of a small ViT on labelled pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import radians
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch
from understudy.inputs.pictures import Pictures
from understudy.metric import task_metric
from understudy.models import quietly
from understudy.recipes.card import card_figures, write_card
from understudy.recipes.recipe import Progress
from understudy.recipes.trainer import epoch_counter, fit, require_accelerate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class VitRecipe:
    """The hyperparameters of a ViT whose single heads matter: narrow, shallow and never quite sure."""

    name: str
    data: Pictures = field(repr=False)
    heads: int
    head_width: int
    layers: int = 4
    mlp_ratio: int = 2
    patch: int = 2  # pixels: 16 patches and the class token for a side of 8
    init: float = 0.15  # ViT's usual 0.02 is for a width of 768; at this width it leaves the patches unread for long
    epochs: int = 160
    batch: int = 64
    learning_rate: float = 2e-3
    warmup: int = 50  # steps
    weight_decay: float = 0.05
    dropout: float = 0.1  # a thousand pictures are soon known by heart
    label_smoothing: float = 0.1  # a model that is never certain shows what each head does; one that is hides it
    shift: float = 0.75  # pixels, at most, in training
    rotation: float = 12.0  # degrees, at most, in training
    stretch: float = 0.15  # of size and slant, at most, in training
    flip: bool = False  # every other picture mirrored in training, left to right: not for digits and letters
    # Whether epoch and index alone decide how a picture is moved, so that a training which goes on from a checkpoint
    # sees what it would have seen. The bundled models were trained without.
    by_index: bool = False
    measured: int = 128  # held-out pictures for the figures of each layer on the card

    def __post_init__(self) -> None:
        if self.data.side % self.patch:
            possible = ", ".join(str(size) for size in range(1, self.data.side + 1) if self.data.side % size == 0)
            raise UnderstudyError(
                f"Patches of {self.patch} pixels do not divide the pictures of {self.data.name}, {self.data.side} "
                f"pixels wide: choose patch={possible}, or another side."
            )

    @property
    def summary(self) -> str:
        """One sentence that says what is trained on what."""
        shape = f"{self.layers} layers of {self.heads} heads, width {self.heads * self.head_width}"
        return f"A ViT ({shape}) trained on {self.data.title}."

    def train(
        self, out: Path, *, seed: int, progress: Progress | None, callbacks: Sequence[Any] = (), **arguments: Any
    ) -> bool:
        """Train the model into `out`; `callbacks` are those of `transformers.Trainer`."""
        require_accelerate()
        from transformers import set_seed

        self.data.held_out.batch([0])  # decodes what is kept in memory: a corrupt picture shows before the training
        prepared = json.dumps(preprocessor(self.data.side, self.data.channels), indent=2)
        (out / "preprocessor_config.json").write_text(prepared + "\n", encoding="utf-8")
        set_seed(seed)
        examples, epoch = self.data.training, epoch_counter()

        def load(indices: Sequence[int]) -> Batch:
            batch = examples.batch(indices)
            chance = _decided(seed, epoch.now, indices) if self.by_index else None
            pixels = moved(batch["pixel_values"], self.shift, self.rotation, self.stretch, chance)
            return {**batch, "pixel_values": mirrored(pixels, chance) if self.flip else pixels}

        return fit(
            self.model(),
            load,
            len(examples),
            out,
            recipe=self.told(),
            defaults=self.arguments(),
            arguments=arguments,
            seed=seed,
            progress=progress,
            callbacks=[epoch, *callbacks],
        )

    def describe(self, out: Path) -> None:
        """Measure the model in `out` on the held-out pictures and write its card."""
        from transformers import ViTForImageClassification

        with quietly():
            model = ViTForImageClassification.from_pretrained(out, use_safetensors=True)
        unseen = self.data.held_out
        figures = {
            "accuracy": f"{task_metric(model, unseen).value:.2%} of {len(unseen):,} pictures",
            "training pictures": f"{len(self.data.training):,}",
            "parameters": f"{model.num_parameters():,}",
            **card_figures(model, unseen.take(range(min(self.measured, len(unseen))))),
        }
        write_card(out, name=self.name, summary=self.summary, figures=figures, data=self.data.about)

    def told(self) -> dict[str, Any]:
        """The recipe as the record of its training keeps it: all that the weights depend on."""
        aside = ("data", "measured") if self.by_index else ("data", "measured", "by_index")
        settings = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in aside}
        return {**settings, **self.data.told()}

    def model(self) -> PreTrainedModel:
        """The untrained model."""
        from transformers import ViTConfig, ViTForImageClassification

        width = self.heads * self.head_width
        config = ViTConfig(
            image_size=self.data.side,
            patch_size=self.patch,
            num_channels=self.data.channels,
            num_labels=len(self.data.classes),
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            hidden_size=width,
            intermediate_size=self.mlp_ratio * width,
            initializer_range=self.init,
            hidden_dropout_prob=self.dropout,
            id2label=dict(enumerate(self.data.classes)),
            label2id={name: label for label, name in enumerate(self.data.classes)},
        )
        return ViTForImageClassification(config)

    def arguments(self) -> dict[str, Any]:
        """The recipe in the words of `transformers.TrainingArguments`."""
        return {
            "num_train_epochs": self.epochs,
            "per_device_train_batch_size": self.batch,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": self.warmup,
            "weight_decay": self.weight_decay,
            "label_smoothing_factor": self.label_smoothing,
        }


def family(
    data: Pictures, heads: Sequence[int] = (3, 6, 12), head_width: int = 8, **settings: Any
) -> dict[str, VitRecipe]:
    """Recipes that differ in the number of heads alone, by name.

    >>> from understudy.recipes.digits import DIGITS
    >>> list(family(DIGITS.data, epochs=40))
    ['digits-3x8', 'digits-6x8', 'digits-12x8']

    `settings` are further fields of `VitRecipe`.
    """
    recipes = [VitRecipe(f"{data.name}-{count}x{head_width}", data, count, head_width, **settings) for count in heads]
    return {recipe.name: recipe for recipe in recipes}


def preprocessor(side: int, channels: int) -> dict[str, Any]:
    """The image processor that turns a picture's file into the model's [-1, 1]."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": 2,  # bilinear, as the pictures are resized for training
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }


def _decided(seed: int, epoch: int, indices: Sequence[int]) -> torch.Generator:
    """Chance that is the same for the same pictures of the same epoch."""
    text = f"{seed} {epoch} {list(indices)}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big"))


def moved(
    pixels: Tensor, shift: float, rotation: float, stretch: float, chance: torch.Generator | None = None
) -> Tensor:
    """The pictures, each shifted (pixels), turned (degrees) and stretched (share) at random, by at most so much."""
    count, side = len(pixels), pixels.shape[-1]
    angle = _spread(chance, count) * radians(rotation)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).view(count, 2, 2)
    warp = turn + stretch * _spread(chance, count, 2, 2)
    offset = _spread(chance, count, 2, 1) * shift * 2 / side  # the grid is two units wide
    grid = affine_grid(torch.cat([warp, offset], dim=-1), list(pixels.shape), align_corners=False)
    # What lies around a picture is black, -1, but the sampler pads with 0.
    return grid_sample(pixels + 1, grid, align_corners=False) - 1


def mirrored(pixels: Tensor, chance: torch.Generator | None = None) -> Tensor:
    """The pictures, each mirrored left to right or not, at random."""
    return torch.where(torch.rand(len(pixels), 1, 1, 1, generator=chance) < 0.5, pixels.flip(-1), pixels)


def _spread(chance: torch.Generator | None, *shape: int) -> Tensor:
    return torch.rand(shape, generator=chance) * 2 - 1  # uniform between -1 and 1
