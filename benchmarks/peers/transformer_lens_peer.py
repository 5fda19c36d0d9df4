"""TransformerLens: a hook on `hook_z`; to resume, `start_at_layer` from the cached `resid_pre`.

Follows `run_with_hooks` and `run_with_cache(names_filter=...)` of "Main Demo", and `start_at_layer` of
`HookedTransformer.forward`. Weights are taken as they are, nothing folded or centred: the outputs are the model's.

Two classes, each where it is faster. A full forward goes through `TransformerBridge`, which runs the Hugging Face model
itself; `start_at_layer` goes through `HookedTransformer`, where it leaves out the blocks before. In TransformerLens 4
only the bridge is left, and its `start_at_layer` runs the blocks before all the same and throws their output away; so
the last version that can resume is the one that is timed.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings

import torch
from benchmarks.cases import Case
from benchmarks.peers.contract import CannotRun, Way
from benchmarks.peers.divergence import Divergence
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
from transformers import PreTrainedTokenizerFast


def _gate(z: Tensor, gates: Tensor) -> Tensor:
    """`z`: `[rows, tokens, heads, width]`, or with heads and width as one."""
    heads = z.view(*z.shape[:2], gates.shape[1], -1) if z.ndim == 3 else z
    return (heads * gates[:, None, :, None]).view(z.shape)


class Full(Way):
    """A full forward for each row."""

    def __init__(self, case: Case) -> None:
        (self.inputs,) = case.input(0).values()
        self.hook = f"blocks.{case.layer}.attn.hook_z"
        self.model = _bridge(case)
        with torch.inference_mode():
            self.divergence = Divergence(self.model(self.inputs))

    def batch(self, gates: Tensor) -> Tensor:
        rows = self.inputs.expand(len(gates), *self.inputs.shape[1:])
        logits = self.model.run_with_hooks(rows, fwd_hooks=[(self.hook, lambda z, hook: _gate(z, gates))])  # noqa: ARG005
        return self.divergence(logits)


class Resume(Way):
    """The layers before do not run again."""

    def __init__(self, case: Case) -> None:
        if case.name not in _HOOKED:
            raise CannotRun("start_at_layer is for text models only.")
        (tokens,) = case.input(0).values()
        self.layer, self.hook = case.layer, f"blocks.{case.layer}.attn.hook_z"
        self.model = _hooked(case)
        name = f"blocks.{case.layer}.hook_resid_pre"
        with torch.inference_mode():
            logits, cache = self.model.run_with_cache(tokens, names_filter=name)
            self.residual, self.divergence = cache[name], Divergence(logits)

    def batch(self, gates: Tensor) -> Tensor:
        rows = self.residual.expand(len(gates), -1, -1)
        logits = self.model.run_with_hooks(
            rows,
            start_at_layer=self.layer,
            fwd_hooks=[(self.hook, lambda z, hook: _gate(z, gates))],  # noqa: ARG005
        )
        return self.divergence(logits)


def _bridge(case: Case) -> TransformerBridge:
    """The bridge over a copy of the model, because it changes the modules that it wraps."""
    model = copy.deepcopy(case.model)
    model.config.architectures = [type(model).__name__]
    # Without a hub, the bridge reads the config from a folder, and wants a tokenizer that it is never asked to use.
    words = Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))
    names = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<s>")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu").eval()


def _hooked(case: Case) -> HookedTransformer:
    """A HookedTransformer with the model's weights, by the conversions that `from_pretrained_no_processing` uses."""
    config = case.model.config
    shape, convert = _HOOKED[case.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        cfg = HookedTransformerConfig(
            n_layers=config.num_hidden_layers,
            d_model=config.hidden_size,
            d_head=config.hidden_size // config.num_attention_heads,
            n_heads=config.num_attention_heads,
            n_ctx=config.max_position_embeddings,
            d_vocab=config.vocab_size,
            original_architecture=type(case.model).__name__,
            device="cpu",
            **shape(config),
        )
        model = HookedTransformer(cfg)
    logging.disable(logging.WARNING)  # it warns that nothing is folded, which is what is wanted
    try:
        model.load_and_process_state_dict(
            convert(case.model, cfg),
            fold_ln=False,
            center_writing_weights=False,
            center_unembed=False,
            fold_value_biases=False,
        )
    finally:
        logging.disable(logging.NOTSET)
    return model.eval()


def _gpt2_shape(config: object) -> dict[str, object]:
    return {
        "d_mlp": config.n_inner or 4 * config.n_embd,
        "eps": config.layer_norm_epsilon,
        "act_fn": config.activation_function,
        "normalization_type": "LN",
    }


def _llama_shape(config: object) -> dict[str, object]:
    return {
        "n_key_value_heads": config.num_key_value_heads,
        "d_mlp": config.intermediate_size,
        "eps": config.rms_norm_eps,
        "act_fn": config.hidden_act,
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "rotary_dim": config.hidden_size // config.num_attention_heads,
        "rotary_adjacent_pairs": False,
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "final_rms": True,
        "gated_mlp": True,
    }


_HOOKED = {"gpt2": (_gpt2_shape, convert_gpt2_weights), "llama": (_llama_shape, convert_llama_weights)}
