"""The cost of whole studies by the law: the paper's, and one of a model of 70 billion parameters.

    python -m benchmarks.plans [--rate 4e14]

No weights are needed: models are built from their shapes alone. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import understudy as us

SEARCHES = ("refine", "screen:3", "estimate")
RATE = 2e14  # what one accelerator of 2024 reaches in half precision


@dataclass(frozen=True)
class Study:
    """Models of one protocol; each with its name and the batch of one input."""

    name: str
    inputs: int
    layers: str
    paper: str  # the search of the paper's protocol
    models: tuple[tuple[str, nn.Module, dict[str, torch.Tensor]], ...]


def studies() -> Iterator[Study]:
    """The natural families of the paper, its training dynamics, and a study that it could not afford."""
    sizes = {"Tiny": (192, 3, 12), "Small": (384, 6, 12), "Base": (768, 12, 12), "Large": (1024, 16, 24)}
    yield Study("ViT, Tiny to Large", 512, "last", "grid:31", tuple(_vit(*size) for size in sizes.items()))
    sizes = {
        "Tiny": (128, 2, 2),
        "Mini": (256, 4, 4),
        "Small": (512, 8, 4),
        "Base": (768, 12, 12),
        "Large": (1024, 16, 24),
    }
    yield Study("BERT, Tiny to Large", 32, "last", "grid:16", tuple(_bert(*size) for size in sizes.items()))
    shapes = {"1.5B": (1536, 12, 2, 28, 8960), "3B": (2048, 16, 2, 36, 11008), "7B": (3584, 28, 4, 28, 18944)}
    shapes |= {"14B": (5120, 40, 8, 48, 13824)}
    yield Study("Qwen2.5, 1.5B to 14B", 32, "quarters", "grid:16", tuple(_qwen(*size) for size in shapes.items()))
    yield Study("training dynamics, 11 checkpoints", 11 * 512, "quarters", "grid:16", (_vit("Small", (384, 6, 12)),))
    yield Study("Llama, 70B, 64 heads", 32_768, "quarters", "grid:16", (_llama70b(),))


def _vit(name: str, size: tuple[int, int, int]) -> tuple[str, nn.Module, dict[str, torch.Tensor]]:
    width, heads, layers = size
    config = ViTConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=4 * width,
        num_labels=1000,
    )
    with torch.device("meta"):
        model = ViTForImageClassification(config).eval()
    return name, model, {"pixel_values": torch.zeros(1, 3, 224, 224)}


def _bert(name: str, size: tuple[int, int, int]) -> tuple[str, nn.Module, dict[str, torch.Tensor]]:
    width, heads, layers = size
    config = BertConfig(
        hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=4 * width
    )
    with torch.device("meta"):
        model = BertForMaskedLM(config).eval()
    positions = torch.zeros(1, 64, dtype=torch.bool)
    positions[:, :8] = True
    return name, model, {"input_ids": torch.zeros(1, 64, dtype=torch.long), "positions": positions}


def _qwen(name: str, size: tuple[int, int, int, int, int]) -> tuple[str, nn.Module, dict[str, torch.Tensor]]:
    width, heads, groups, layers, inner = size
    config = Qwen2Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_hidden_layers=layers,
        intermediate_size=inner,
        vocab_size=151_936,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).eval()
    return name, model, {"input_ids": torch.zeros(1, 128, dtype=torch.long)}


def _llama70b() -> tuple[str, nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=80,
        intermediate_size=28_672,
        vocab_size=128_256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    return "70B", model, {"input_ids": torch.zeros(1, 128, dtype=torch.long)}


def rows(rate: float) -> Iterator[tuple[str, ...]]:
    """One row for each study and search."""
    for study in studies():
        for search in (study.paper, *SEARCHES):
            evaluations = flops = seconds = disk = 0.0
            for _, model, batch in study.models:
                inputs = us.Inputs(tuple(map(str, range(study.inputs))), lambda _, batch=batch: batch)
                plan = us.plan(model, inputs, layers=study.layers, search=search, rate=rate)
                evaluations += plan.evaluations
                flops += plan.flops
                seconds += plan.seconds
                disk += plan.disk
            hours = f"{seconds / 3600:,.1f} h" if seconds > 3600 else f"{seconds:,.1f} s"
            yield (study.name, search, f"{evaluations:,.0f}", f"{flops:.1e}", hours, f"{disk / 2**20:,.0f} MiB")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=RATE, help="operations a second of one accelerator")
    options = parser.parse_args()
    print(f"| study | search | evaluations | operations | time at {options.rate:.0e}/s | on disk |")
    print("|---|---|---|---|---|---|")
    for row in rows(options.rate):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
