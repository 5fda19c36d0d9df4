"""Where the three architectures keep what a peer has to name: blocks, attention, the projection that reads heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Paths:
    """Dotted names: `blocks` and `embeddings` from the model, the others from one block."""

    blocks: str
    attention: str
    projection: str
    embeddings: str  # the module that makes `[rows, tokens, width]` of the input


PATHS = {
    "vit": Paths("vit.layers", "attention", "attention.o_proj", "vit.embeddings"),
    "gpt2": Paths("transformer.h", "attn", "attn.c_proj", "transformer.wte"),
    "llama": Paths("model.layers", "self_attn", "self_attn.o_proj", "model.embed_tokens"),
}


def spread(gates: Tensor, width: int) -> Tensor:
    """A gate for each value that the projection reads: `[rows, heads]` -> `[rows, 1, heads * width]`."""
    return gates.repeat_interleave(width, 1)[:, None]
