"""The recipes of `digits` and `digits-12`: small ViTs on handwritten digits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import radians
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from understudy.inputs.batch import Batch, Inputs
from understudy.inputs.digits import digits, training_digits
from understudy.models import quietly
from understudy.recipes.card import card_figures, write_card
from understudy.recipes.recipe import Progress
from understudy.recipes.trainer import fit, require_accelerate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIDE = 8  # pixels
CLASSES = 10
DATA = (
    "The 1,797 images of scikit-learn's `load_digits`, a copy of the test set of the UCI data set *Optical Recognition "
    "of Handwritten Digits* (E. Alpaydin, C. Kaynak; CC BY 4.0). Every third image is held out: never trained on, and "
    "the input of `understudy.digits()`."
)


@dataclass(frozen=True)
class DigitsRecipe:
    """The hyperparameters of a ViT whose single heads matter: narrow, shallow and never quite sure."""

    name: str
    heads: int
    head_width: int
    layers: int = 4
    mlp_ratio: int = 2
    patch: int = 2  # 16 patches and the class token
    init: float = 0.15  # ViT's usual 0.02 is for a width of 768; at this width it leaves the patches unread for long
    epochs: int = 160
    batch: int = 64
    learning_rate: float = 2e-3
    warmup: int = 50  # steps
    weight_decay: float = 0.05
    dropout: float = 0.1  # twelve hundred digits are soon known by heart
    label_smoothing: float = 0.1  # a model that is never certain shows what each head does; one that is hides it
    shift: float = 0.75  # pixels, at most, in training
    rotation: float = 12.0  # degrees, at most, in training
    stretch: float = 0.15  # of size and slant, at most, in training
    measured: int = 128  # held-out digits for the figures of each layer on the card

    @property
    def summary(self) -> str:
        """One sentence that says what is trained on what."""
        shape = f"{self.layers} layers of {self.heads} heads, width {self.heads * self.head_width}"
        return f"A ViT ({shape}) trained on scikit-learn's handwritten digits."

    def train(self, out: Path, *, seed: int, progress: Progress | None, **arguments: Any) -> bool:
        """Train the model into `out`."""
        require_accelerate()
        from transformers import set_seed

        set_seed(seed)
        examples = training_digits()

        def load(indices: Sequence[int]) -> Batch:
            batch = examples.batch(indices)
            return {**batch, "pixel_values": moved(batch["pixel_values"], self.shift, self.rotation, self.stretch)}

        writer = fit(
            self.model(),
            load,
            len(examples),
            out,
            recipe={key: value for key, value in asdict(self).items() if key != "measured"},
            defaults=self.arguments(),
            arguments=arguments,
            seed=seed,
            progress=progress,
        )
        if writer:
            (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n", encoding="utf-8")
        return writer

    def describe(self, out: Path) -> None:
        """Measure the model in `out` on the held-out digits and write its card."""
        from transformers import ViTForImageClassification

        with quietly():
            model = ViTForImageClassification.from_pretrained(out, use_safetensors=True)
        unseen = digits()
        figures = {
            "accuracy": f"{accuracy(model, unseen):.2%} of {len(unseen)} digits",
            "training digits": f"{len(training_digits()):,}",
            "parameters": f"{model.num_parameters():,}",
            **card_figures(model, digits(self.measured)),
        }
        write_card(out, name=self.name, summary=self.summary, figures=figures, data=DATA)

    def model(self) -> PreTrainedModel:
        """The untrained model."""
        from transformers import ViTConfig, ViTForImageClassification

        width = self.heads * self.head_width
        config = ViTConfig(
            image_size=SIDE,
            patch_size=self.patch,
            num_channels=1,
            num_labels=CLASSES,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            hidden_size=width,
            intermediate_size=self.mlp_ratio * width,
            initializer_range=self.init,
            hidden_dropout_prob=self.dropout,
            id2label={label: str(label) for label in range(CLASSES)},
            label2id={str(label): label for label in range(CLASSES)},
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


DIGITS = DigitsRecipe("digits", heads=6, head_width=8)
DIGITS_12 = DigitsRecipe("digits-12", heads=12, head_width=6)

# What turns an image file, light ink on dark, into the model's [-1, 1].
PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5],
    "image_std": [0.5],
}


def moved(pixels: Tensor, shift: float, rotation: float, stretch: float) -> Tensor:
    """The images, each shifted (pixels), turned (degrees) and stretched (share) at random, by at most so much."""
    count = len(pixels)
    angle = _spread(count) * radians(rotation)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).view(count, 2, 2)
    warp = turn + stretch * _spread(count, 2, 2)
    offset = _spread(count, 2, 1) * shift * 2 / SIDE  # the grid is two units wide
    grid = affine_grid(torch.cat([warp, offset], dim=-1), list(pixels.shape), align_corners=False)
    # The paper around a digit is -1, but the sampler pads with 0.
    return grid_sample(pixels + 1, grid, align_corners=False) - 1


def _spread(*shape: int) -> Tensor:
    return torch.rand(shape) * 2 - 1  # uniform between -1 and 1


def accuracy(model: PreTrainedModel, inputs: Inputs) -> float:
    """The share of inputs whose most probable class is the label."""
    batch = inputs.batch(range(len(inputs)))
    model.eval()
    with torch.no_grad():
        logits = model(pixel_values=batch["pixel_values"].to(model.device)).logits
    return float((logits.argmax(-1).cpu() == batch["labels"]).double().mean())
