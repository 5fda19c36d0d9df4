"""The bare model: the layers after a site and the head, called plainly on rows that are already there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.cases import Case
from torch import Tensor


def remaining(case: Case) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What is left of the model after the site of the case: (the blocks, the final norm and head)."""
    model, after = case.model, case.layer + 1
    if case.name == "gpt2":
        blocks, norm, head = model.transformer.h, model.transformer.ln_f, model.lm_head

        def behind(block: torch.nn.Module, hidden: Tensor) -> Tensor:
            return hidden + block.mlp(block.ln_2(hidden))

        def call(block: torch.nn.Module, hidden: Tensor) -> Tensor:
            return _first(block(hidden))

    else:
        blocks, norm, head = model.model.layers, model.model.norm, model.lm_head
        places = torch.arange(case.batch["input_ids"].shape[1])[None]

        def behind(block: torch.nn.Module, hidden: Tensor) -> Tensor:
            return hidden + block.mlp(block.post_attention_layernorm(hidden))

        def call(block: torch.nn.Module, hidden: Tensor) -> Tensor:
            rotary = model.model.rotary_emb(hidden, places)
            return _first(block(hidden, position_embeddings=rotary))

    def run(hidden: Tensor) -> Tensor:
        hidden = behind(blocks[case.layer], hidden)
        for block in blocks[after:]:
            hidden = call(block, hidden)
        return hidden

    return run, lambda hidden: head(norm(hidden))


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
