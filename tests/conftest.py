import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never wait for a network
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest


@pytest.fixture(scope="module")
def vit():
    """A small random ViT."""
    import torch

    from families import build

    return build("vit", torch.float32)


@pytest.fixture(scope="module")
def pictures():
    """Six inputs of it."""
    import torch

    from families import batch

    return batch("vit", count=6, dtype=torch.float32)
