"""GPT-2-style models from scratch: the shape, and the one protocol under which shapes are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch
from understudy.inputs.tokens import END, Tokens
from understudy.recipes.recipe import Progress
from understudy.recipes.trainer import fit, require_accelerate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """How large a GPT-2 is, and into how many heads its attention is cut."""

    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads) < 1:
            raise UnderstudyError(f"A model needs at least one layer, one head and a width of 1: {self}.")
        if self.width % self.heads:
            raise UnderstudyError(
                f"A width of {self.width} cannot be cut into {self.heads} heads: give a multiple of {self.heads}."
            )

    @classmethod
    def of_heads(cls, layers: int, width: int, head_width: int) -> Shape:
        """As many heads of this width as the model's width holds.

        >>> Shape.of_heads(12, 768, 64)
        Shape(layers=12, width=768, heads=12)
        """
        if head_width < 1 or width % head_width:
            near = [max(1, width // max(1, head_width)) * head_width, (width // max(1, head_width) + 1) * head_width]
            raise UnderstudyError(
                f"A width of {width} is not a multiple of the head width {head_width}: give {near[0]} or {near[1]}."
            )
        return cls(layers, width, width // head_width)

    @property
    def name(self) -> str:
        """Layers, width and heads."""
        return f"{self.layers}x{self.width}x{self.heads}"

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.width // self.heads


def parameters(shape: Shape, *, vocabulary: int, context: int) -> int:
    """The number of parameters, embeddings tied, without making the model.

    >>> parameters(Shape(12, 768, 12), vocabulary=50257, context=1024)
    124439808
    """
    with torch.device("meta"):
        return int(gpt2(shape, vocabulary=vocabulary, context=context, end=0).num_parameters())


def gpt2(shape: Shape, *, vocabulary: int, context: int, end: int) -> PreTrainedModel:
    """An untrained GPT-2, embeddings tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own function, fused: half as fast again on a CPU
        # A few passes over the data do not overfit.
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        bos_token_id=end,
        eos_token_id=end,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers takes anyway, after a warning
    return model


def windows(
    stream: Tensor | np.ndarray, length: int, shift: Callable[[Sequence[int]], Sequence[int]]
) -> tuple[Callable[[Sequence[int]], Batch], int]:
    """Contexts of a stream of tokens, as a loader of batches, and how many there are.

    Indices beyond that number are further passes. `shift` moves each context, by less than its length, so that no
    token is always first in its context.
    """
    count = len(stream) // length - 1

    def load(indices: Sequence[int]) -> Batch:
        starts = [index % count * length + by for index, by in zip(indices, shift(indices), strict=True)]
        rows = np.stack([np.asarray(stream[start : start + length]) for start in starts]).astype(np.int64)
        tokens = torch.from_numpy(rows)  # [contexts, length]
        return {"input_ids": tokens, "labels": tokens}

    return load, count


def _mixed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Budget:
    """What every model of a comparison gets alike: tokens, context length and optimization."""

    context: int
    tokens: int  # seen in training
    batch: int  # contexts that a device takes at once
    learning_rate: float
    vocabulary: int
    warmup: float = 0.05  # of the steps
    weight_decay: float = 0.1
    beta2: float = 0.95
    accumulation: int = 1  # such batches in a step

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UnderstudyError(
                f"A budget of {self.tokens:,} tokens is less than one step of {self.batch * self.accumulation} "
                f"contexts with {self.context} tokens: give more tokens, or smaller steps."
            )

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.tokens // (self.batch * self.accumulation * self.context)

    def arguments(self, devices: int = 1) -> dict[str, Any]:
        """The same in the words of `transformers.TrainingArguments`; the devices share the contexts of a step."""
        if self.accumulation % devices:
            raise UnderstudyError(
                f"A step of {self.accumulation} batches cannot be shared by {devices} devices: let "
                f"CUDA_VISIBLE_DEVICES show a number of them that divides {self.accumulation}."
            )
        return {
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation // devices,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": int(self.warmup * self.steps),
            "weight_decay": self.weight_decay,
            "adam_beta2": self.beta2,
        }


@dataclass(frozen=True)
class Gpt2Recipe:
    """One shape under a budget, on tokens that it shares with others."""

    name: str
    shape: Shape
    budget: Budget
    text: Tokens

    def told(self) -> dict[str, Any]:
        """What decides the weights, apart from the seed."""
        shared = {"corpus": self.text.about["corpus"], "tokens": self.text.about["fingerprint"]}
        return {**asdict(self.shape), **asdict(self.budget), **shared}

    def train(
        self, out: Path, *, seed: int, progress: Progress | None, callbacks: Sequence[Any] = (), **arguments: Any
    ) -> bool:
        """Train the model into `out`."""
        require_accelerate()
        from transformers import PreTrainedTokenizerFast, set_seed

        fast = PreTrainedTokenizerFast(
            tokenizer_file=str(self.text.tokenizer_file), eos_token=END, model_max_length=self.budget.context
        )
        fast.save_pretrained(out)
        set_seed(seed)
        size = int(self.text.about["size"])
        model = gpt2(self.shape, vocabulary=size, context=self.budget.context, end=self.text.end)
        length = self.budget.context
        # Decided by the index alone: a training that goes on from a checkpoint sees what it would have seen.
        load, count = windows(self.text.training, length, lambda indices: [_mixed(seed, at) % length for at in indices])
        passes = -(-self.budget.steps * self.budget.batch * self.budget.accumulation // count)
        return fit(
            model,
            load,
            count * passes,
            out,
            recipe=self.told(),
            defaults=self.budget.arguments(max(1, torch.cuda.device_count())),
            arguments=arguments,
            seed=seed,
            progress=progress,
            callbacks=callbacks,
        )
