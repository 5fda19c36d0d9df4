"""The three jobs that every tool is timed on: a model, one layer of it, some inputs and what is compared.

Weights are random, which changes no cost. They are drawn wide enough that removing one head moves the outcome by far
more than float32 rounding does; and the heads of the layer are made partly alike, because those of random weights are
orthogonal and none could stand in for another. So the answers of two tools can be held against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

_SEED = 0
_ALIKE = 0.8  # the share of the first head's weights in those of the others


@dataclass(frozen=True)
class Case:
    """One job: every ordered pair of the `heads` of `layer`, on the inputs of `batch`."""

    name: str
    title: str
    model: PreTrainedModel
    batch: dict[str, Tensor]  # as the model's forward takes it
    layer: int
    heads: int
    outcome: str  # "classes", or "next" for the next-token distributions of all positions

    def input(self, index: int) -> dict[str, Tensor]:
        """The batch of one input."""
        return {name: value[index : index + 1] for name, value in self.batch.items()}


def vit(*, tiny: bool = False, inputs: int = 1) -> Case:
    """The last block of a ViT-B-sized image classifier."""
    torch.manual_seed(_SEED)
    size = (
        {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64}
        | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_labels": 10}
        if tiny
        else {"num_labels": 1000}
    )
    config = ViTConfig(**size, initializer_range=0.3 if tiny else 0.12)
    model = ViTForImageClassification(config).eval()
    attention = model.vit.layers[-1].attention
    read = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    _liken(*read, attention.o_proj.weight.T, heads=config.num_attention_heads)
    pixels = torch.randn(inputs, 3, config.image_size, config.image_size)
    title = f"ViT-B-sized, {config.num_labels} classes, last block"
    return _case("vit", title, model, {"pixel_values": pixels}, config.num_hidden_layers - 1, "classes", tiny)


def gpt2(*, tiny: bool = False, inputs: int = 1) -> Case:
    """The middle of a GPT-2-small-sized language model."""
    torch.manual_seed(_SEED)
    size = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 101, "n_positions": 64} if tiny else {}
    config = GPT2Config(**size, initializer_range=0.3 if tiny else 0.12)
    model = GPT2LMHeadModel(config).eval()
    attention = model.transformer.h[config.n_layer // 2].attn
    read = attention.c_attn.weight.T.chunk(3)  # queries, keys, values
    _liken(*read, attention.c_proj.weight, heads=config.n_head)
    tokens = torch.randint(config.vocab_size, (inputs, 12 if tiny else 128))
    title = f"GPT-2-small-sized, {tokens.shape[1]} tokens, middle block"
    return _case("gpt2", title, model, {"input_ids": tokens}, config.n_layer // 2, "next", tiny)


def llama(*, tiny: bool = False, inputs: int = 1) -> Case:
    """The middle of a Llama with grouped queries, in the shape of SmolLM-135M."""
    torch.manual_seed(_SEED)
    size = (
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4}
        | {"intermediate_size": 96, "vocab_size": 101}
        if tiny
        else {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
        | {"intermediate_size": 1536, "vocab_size": 49152}
    )
    config = LlamaConfig(
        **size, tie_word_embeddings=True, max_position_embeddings=2048, initializer_range=0.3 if tiny else 0.12
    )
    model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[config.num_hidden_layers // 2].self_attn
    _liken(attention.k_proj.weight, attention.v_proj.weight, heads=config.num_key_value_heads)
    _liken(attention.q_proj.weight, attention.o_proj.weight.T, heads=config.num_attention_heads)
    tokens = torch.randint(config.vocab_size, (inputs, 12 if tiny else 128))
    title = f"SmolLM-135M-sized Llama, {tokens.shape[1]} tokens, middle block"
    return _case("llama", title, model, {"input_ids": tokens}, config.num_hidden_layers // 2, "next", tiny)


def _liken(*weights: Tensor, heads: int) -> None:
    """Bring each head's rows of these weights nearer to the first head's, at their own size."""
    with torch.no_grad():
        for weight in weights:
            each = weight.unflatten(0, (heads, -1))  # [heads, width, ...], a view
            each[1:] = _ALIKE * each[:1] + (1 - _ALIKE**2) ** 0.5 * each[1:]


def _case(
    name: str, title: str, model: PreTrainedModel, batch: dict[str, Tensor], layer: int, outcome: str, tiny: bool
) -> Case:
    title = f"{title}, in miniature" if tiny else title
    return Case(name, title, model, batch, layer, model.config.num_attention_heads, outcome)


CASES: dict[str, Callable[..., Case]] = {"vit": vit, "gpt2": gpt2, "llama": llama}
