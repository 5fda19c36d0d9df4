"""Random inputs that fit a model: enough to check the engine, never to measure."""

from __future__ import annotations

from typing import Any

import torch

from understudy.anatomy import Anatomy
from understudy.inputs.batch import Batch


def chance(body: Anatomy, *, count: int = 3, length: int = 24, seed: int = 0) -> Batch:
    """A batch of random pixels, or of random tokens with padding and with positions that differ in number."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = getattr(body.model, "config", None)
    if not body.reads_text:
        shape = _image_shape(body)
        return {"pixel_values": torch.randn(count, *shape, generator=generator)}
    length = min(length, int(getattr(config, "max_position_embeddings", length)) - 2)
    ids = torch.randint(3, int(config.vocab_size), (count, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:2, -length // 4 :] = 0
    if config.pad_token_id is not None:
        ids[ids == config.pad_token_id] = 3 if config.pad_token_id != 3 else 4
        ids[mask == 0] = config.pad_token_id
    positions = torch.rand(count, length, generator=generator) < 0.4
    positions[:, 0] = True
    return {"input_ids": ids, "attention_mask": mask, "positions": positions & mask.bool()}


def _image_shape(body: Anatomy) -> tuple[int, int, int]:
    patches: Any = getattr(body.model, "patch_embed", None)
    if patches is not None:  # timm
        height, width = patches.img_size or (224, 224)
        return int(patches.proj.in_channels), int(height), int(width)
    config: Any = body.model.config
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return int(config.num_channels), int(height), int(width)
