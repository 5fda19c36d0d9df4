"""A small random model of every family, with inputs, and the plain truth about its sites for the naive checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

LAYERS, HEADS, VOCABULARY, TOKENS, MASK = 3, 4, 61, 9, 5

_text = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_bert = {
    **_text,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "num_labels": 7,
}
_llama = {**_bert, "num_key_value_heads": 2, "head_dim": 12}  # 4 heads of 12 in a width of 32
_vit = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 7,
}
_gpt2 = {
    **_text,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": 32,
    "n_inner": 48,
    "n_positions": 40,
    "num_labels": 7,
}
_neox = {k: v for k, v in _bert.items() if k != "num_labels"}
_distil = {
    **_text,
    "dim": 32,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "hidden_dim": 48,
    "max_position_embeddings": 40,
    "num_labels": 7,
}
_albert = {**_bert, "embedding_size": 16}


@dataclass(frozen=True)
class Case:
    """How to build a model, where its output projections are, and what its head predicts."""

    build: Callable[[], nn.Module]
    sites: Callable[[Any], list[nn.Module]]
    outcome: str


def _case(kind: type, config: Any, sites: Callable[[Any], list[nn.Module]], outcome: str) -> Case:
    return Case(lambda: kind(config()), sites, outcome)


def _blocks(base: str, blocks: str, site: str) -> Callable[[Any], list[nn.Module]]:
    return lambda model: [m.get_submodule(site) for m in model.get_submodule(f"{base}.{blocks}")]


def _albert_sites(model: Any) -> list[nn.Module]:
    groups = model.albert.encoder.albert_layer_groups
    return [groups[int(i / (LAYERS / len(groups)))].albert_layers[0].attention.dense for i in range(LAYERS)]


_llama_sites = _blocks("model", "layers", "self_attn.o_proj")
_bert_sites = _blocks("bert", "encoder.layer", "attention.output.dense")
_roberta_sites = _blocks("roberta", "encoder.layer", "attention.output.dense")
_gpt2_sites = _blocks("transformer", "h", "attn.c_proj")
_distil_sites = _blocks("distilbert", "transformer.layer", "attention.out_lin")
_neox_sites = _blocks("gpt_neox", "layers", "attention.dense")

CASES: dict[str, Case] = {
    "vit": _case(
        hf.ViTForImageClassification,
        lambda: hf.ViTConfig(**_vit),
        _blocks("vit", "layers", "attention.o_proj"),
        "classes",
    ),
    "deit": _case(
        hf.DeiTForImageClassification,
        lambda: hf.DeiTConfig(**_vit),
        _blocks("deit", "layers", "attention.o_proj"),
        "classes",
    ),
    "deit-distilled": _case(
        hf.DeiTForImageClassificationWithTeacher,
        lambda: hf.DeiTConfig(**_vit),
        _blocks("deit", "layers", "attention.o_proj"),
        "classes",
    ),
    "dinov2": _case(
        hf.Dinov2ForImageClassification,
        lambda: hf.Dinov2Config(**{**_vit, "mlp_ratio": 2, "layerscale_value": 0.7}),
        _blocks("dinov2", "encoder.layer", "attention.o_proj"),
        "classes",
    ),
    "bert": _case(hf.BertForMaskedLM, lambda: hf.BertConfig(**_bert), _bert_sites, "masked"),
    "bert-classes": _case(hf.BertForSequenceClassification, lambda: hf.BertConfig(**_bert), _bert_sites, "classes"),
    "roberta": _case(hf.RobertaForMaskedLM, lambda: hf.RobertaConfig(**_bert), _roberta_sites, "masked"),
    "roberta-classes": _case(
        hf.RobertaForSequenceClassification, lambda: hf.RobertaConfig(**_bert), _roberta_sites, "classes"
    ),
    "albert": _case(hf.AlbertForMaskedLM, lambda: hf.AlbertConfig(**_albert), _albert_sites, "masked"),
    "albert-groups": _case(
        hf.AlbertForSequenceClassification,
        lambda: hf.AlbertConfig(**{**_albert, "num_hidden_groups": 2}),
        _albert_sites,
        "classes",
    ),
    "distilbert": _case(hf.DistilBertForMaskedLM, lambda: hf.DistilBertConfig(**_distil), _distil_sites, "masked"),
    "distilbert-classes": _case(
        hf.DistilBertForSequenceClassification, lambda: hf.DistilBertConfig(**_distil), _distil_sites, "classes"
    ),
    "gpt2": _case(hf.GPT2LMHeadModel, lambda: hf.GPT2Config(**_gpt2), _gpt2_sites, "next"),
    "gpt2-classes": _case(hf.GPT2ForSequenceClassification, lambda: hf.GPT2Config(**_gpt2), _gpt2_sites, "classes"),
    "gpt_neox": _case(hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**_neox), _neox_sites, "next"),
    "gpt_neox-serial": _case(
        hf.GPTNeoXForCausalLM,
        lambda: hf.GPTNeoXConfig(**_neox, use_parallel_residual=False),
        _neox_sites,
        "next",
    ),
    "llama": _case(hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_llama), _llama_sites, "next"),
    "llama-classes": _case(
        hf.LlamaForSequenceClassification, lambda: hf.LlamaConfig(**_llama), _llama_sites, "classes"
    ),
    "mistral": _case(hf.MistralForCausalLM, lambda: hf.MistralConfig(**_llama, sliding_window=4), _llama_sites, "next"),
    "qwen2": _case(
        hf.Qwen2ForCausalLM,
        lambda: hf.Qwen2Config(**_llama, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        _llama_sites,
        "next",
    ),
    "qwen3": _case(hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**_llama), _llama_sites, "next"),
    "gemma": _case(hf.GemmaForCausalLM, lambda: hf.GemmaConfig(**_llama), _llama_sites, "next"),
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A random model whose heads matter: matrices are scaled so that every part of a block has an effect."""
    torch.manual_seed(seed)
    model = CASES[name].build()
    return lively(model).to(dtype).eval()


def lively(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name and "wte" not in name and "wpe" not in name:
            nn.init.normal_(parameter, std=1.2 / parameter.shape[-1] ** 0.5)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5)
        elif "bias" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def batch(name: str, count: int = 4, seed: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Inputs for a case: padding on both sides, and masks that differ in number from row to row."""
    generator = torch.Generator().manual_seed(seed)
    outcome = CASES[name].outcome if name in CASES else "classes"
    if name.split("-")[0] in ("vit", "deit", "dinov2") or name not in CASES:
        return {"pixel_values": torch.randn(count, 1, 8, 8, generator=generator, dtype=dtype)}
    ids = torch.randint(6, VOCABULARY, (count, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    if count > 1:
        mask[1, -3:] = 0  # padded on the right
    if count > 2 and outcome == "next":
        mask[2, :2] = 0  # on the left
    ids[mask == 0] = 0
    made = {"input_ids": ids, "attention_mask": mask}
    if outcome == "masked":
        positions = torch.zeros_like(ids, dtype=torch.bool)
        for row in range(count):
            positions[row, 1 : 2 + row % 3] = True  # one, two or three
        made["input_ids"] = ids.masked_fill(positions, MASK)
        made["positions"] = positions
    return made
