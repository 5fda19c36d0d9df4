"""The table of model families, and a model read through it: blocks, sites, units, embeddings.

To add a family, add one entry to `FAMILIES` under the `model_type` of its config, and one line
to the families of the tests; `understudy check` then proves it on any model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import ASIDE


def _site_output(_attention: nn.Module, _hidden: Tensor, projected: Tensor) -> Tensor:
    return projected


def _albert_blocks(base: Any) -> list[nn.Module]:
    # One group of blocks serves many layers: layer l is the l-th application, as in AlbertTransformer.forward.
    config = base.config
    share = config.num_hidden_layers / config.num_hidden_groups
    groups = [base.encoder.albert_layer_groups[int(index / share)] for index in range(config.num_hidden_layers)]
    return [block for group in groups for block in group.albert_layers]


@dataclass(frozen=True)
class Family:
    """Where a family keeps what we need; `blocks` and `embeddings` start at the base model, the rest at a block.

    blocks: the blocks in the order in which they are applied.
    attention: the module that computes the site's input; it is not run again on resume.
    site: the linear map into the residual stream whose input is cut into heads, inside `attention` or after it.
    embeddings: everything that makes the first block's input; not run again either.
    beside: the module, if any, that reads the block's input in parallel to the attention, given the config.
    close: what `attention` does after its site, from (attention, its input, the site's output).
    heads: the number of heads, given the base model and a block.
    weights: whether `attention` returns attention weights beside its output.
    input: what the forward calls its input, where that is not the model's own `main_input_name`.
    mlp, down: the module that computes the input of the MLP's own site, and that site: one of these paths.
    attended: what answers in place of the attention when only the MLP is resumed, where that is not `attention`.
    """

    title: str
    blocks: Callable[[Any], Sequence[nn.Module]]
    attention: str
    site: str
    embeddings: tuple[str, ...]
    beside: Callable[[Any], str | None] = lambda _config: None
    close: Callable[[Any, Tensor, Tensor], Tensor] = _site_output
    heads: Callable[[Any, Any], int] = lambda base, _block: int(base.config.num_attention_heads)
    weights: bool = True
    input: str | None = None
    mlp: str = "mlp"
    down: tuple[str, ...] = ("mlp.fc2", "mlp.down_proj")
    attended: str | None = None


_VIT = Family(
    "ViT, DINO ViT",
    blocks=attrgetter("layers"),
    attention="attention",
    site="attention.o_proj",
    embeddings=("embeddings",),
)
_BERT = Family(
    "BERT",
    blocks=attrgetter("encoder.layer"),
    attention="attention.self",
    site="attention.output.dense",
    embeddings=("embeddings",),
    mlp="intermediate",
    down=("output.dense",),
    attended="attention",
)
_LLAMA = Family(
    "Llama",
    blocks=attrgetter("layers"),
    attention="self_attn",
    site="self_attn.o_proj",
    embeddings=("embed_tokens",),
)

FAMILIES: dict[str, Family] = {
    "vit": _VIT,
    "deit": replace(_VIT, title="DeiT"),
    "dinov2": replace(_VIT, title="DINOv2", blocks=attrgetter("encoder.layer")),
    "bert": _BERT,
    "roberta": replace(_BERT, title="RoBERTa"),
    "albert": Family(
        "ALBERT",
        blocks=_albert_blocks,
        attention="attention",
        site="attention.dense",
        embeddings=("embeddings", "encoder.embedding_hidden_mapping_in"),
        # Here the residual sum and its norm sit inside the attention module.
        close=lambda attention, hidden, projected: attention.LayerNorm(hidden + projected),
        mlp="ffn",
        down=("ffn_output",),
    ),
    "distilbert": Family(
        "DistilBERT",
        blocks=attrgetter("transformer.layer"),
        attention="attention",
        site="attention.out_lin",
        embeddings=("embeddings",),
        mlp="ffn",
        down=("ffn.lin2",),
    ),
    "gpt2": Family(
        "GPT-2",
        blocks=attrgetter("h"),
        attention="attn",
        site="attn.c_proj",
        embeddings=("wte", "wpe"),
        down=("mlp.c_proj",),
    ),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        blocks=attrgetter("layers"),
        attention="attention",
        site="attention.dense",
        embeddings=("embed_in",),
        beside=lambda config: "mlp" if config.use_parallel_residual else None,
        down=("mlp.dense_4h_to_h",),
    ),
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, title="Mistral"),
    "qwen2": replace(_LLAMA, title="Qwen2"),
    "qwen3": replace(_LLAMA, title="Qwen3"),
    "gemma": replace(_LLAMA, title="Gemma"),
    "timm": Family(
        "timm vision_transformer",
        blocks=attrgetter("blocks"),
        attention="attn",
        site="attn.proj",
        embeddings=("patch_embed", "_pos_embed"),
        heads=lambda _base, block: int(block.attn.num_heads),
        weights=False,
        input="x",
    ),
}


@dataclass(frozen=True)
class Layer:
    """One application of a block: its modules, and how its site's input is cut into units.

    attention: the module that computes the site's input; not run again. beside: another one whose output is kept.
    pair, beside_pair: whether they return attention weights beside their output.
    """

    index: int
    block: nn.Module
    attention: nn.Module
    site: nn.Module
    beside: nn.Module | None
    units: int
    width: int  # of one unit
    pair: bool = False
    beside_pair: bool = False
    close: Callable[[Any, Tensor, Tensor], Tensor] = _site_output


@dataclass(frozen=True)
class Anatomy:
    """A model read through its family's entry: `layers` are cut into heads, `sites` into the units asked for."""

    model: nn.Module
    base: nn.Module
    family: Family
    layers: tuple[Layer, ...]
    sites: tuple[Layer, ...]

    def cut(self, units: str) -> Anatomy:
        """The same model with its sites cut into other units: "heads", "kv" or "neurons:N".

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48)
        >>> body = anatomy(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=50)))
        >>> [body.cut(units).sites[0].units for units in ("heads", "kv", "neurons:6")]
        [4, 2, 6]
        """
        kind, _, number = str(units).partition(":")
        if units == "heads":
            return replace(self, sites=self.layers)
        if units == "kv":
            groups = getattr(getattr(self.base, "config", None), "num_key_value_heads", None)
            if groups is None:
                raise UnderstudyError(
                    f"units='kv' needs query heads that share keys and values, but {self.family.title} has none: "
                    "say 'heads' or 'neurons:N'."
                )
            return replace(self, sites=tuple(_grouped(layer, int(groups)) for layer in self.layers))
        if kind == "neurons" and number.isascii() and number.isdecimal() and int(number) > 0:
            return replace(self, sites=tuple(_neurons(self.family, layer, int(number)) for layer in self.layers))
        raise UnderstudyError(
            f"units={units!r} is not possible: the units that can be gated are 'heads', 'kv' and 'neurons:N'."
        )

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        here = next((p.device for p in self.model.parameters() if p.device.type != "meta"), None)
        # Where all weights are offloaded, accelerate knows where they will run.
        away = getattr(getattr(self.model, "_hf_hook", None), "execution_device", None)
        return here if here is not None else torch.device(away if away is not None else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the model's own forward."""
        return next(p.dtype for p in self.layers[-1].block.parameters() if p.is_floating_point())

    @property
    def name(self) -> str:
        """What a reader calls the model: its hub id or folder, else its class."""
        return str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)

    @property
    def reads_text(self) -> bool:
        """Whether the model takes token ids (else pixels)."""
        return getattr(self.model, "main_input_name", None) == "input_ids"

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the forward takes of a batch, where the model is and in its precision."""
        there = {key: value.to(self.device) for key, value in batch.items() if key not in ASIDE}
        return {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in there.items()}

    def run(self, batch: Mapping[str, Tensor]) -> Any:
        """The model's own forward on a batch dict, without a key-value cache."""
        arguments: dict[str, Any] = dict(batch)
        if self.family.input is not None:
            arguments[self.family.input] = arguments.pop("pixel_values", None)
            return self.model(**arguments)
        if "use_cache" in inspect.signature(type(self.model).forward).parameters:
            arguments["use_cache"] = False
        return self.model(**arguments, return_dict=True)

    def layer_index(self, layer: int) -> int:
        """A layer's index from the start; negatives count from the end."""
        count = len(self.layers)
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise UnderstudyError(f"A layer is a whole number, but {layer!r} was given.")
        if not -count <= layer < count:
            raise UnderstudyError(
                f"Layer {layer} is not there: {type(self.model).__name__} has {count} layers, "
                f"0 to {count - 1} (or -{count} to -1)."
            )
        return layer % count


def unwrap(model: nn.Module) -> nn.Module:
    """The module that the user wrote, inside data-parallel, compiled and PEFT wrappers."""
    while True:
        name = type(model).__name__
        if name == "FullyShardedDataParallel":
            raise UnderstudyError(
                "A FullyShardedDataParallel model keeps only pieces of its weights here: measure the module "
                "before it is sharded, or load it from a checkpoint."
            )
        if name in ("DataParallel", "DistributedDataParallel"):
            model = model.module  # type: ignore[assignment]
        elif name == "OptimizedModule":
            model = model._orig_mod  # type: ignore[assignment]
        elif any(parent.__name__ in ("PeftModel", "PeftMixedModel") for parent in type(model).__mro__):
            if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
                raise UnderstudyError(
                    "Prompt and prefix tuning add tokens that the model inside the PEFT wrapper does not see: "
                    "they cannot be measured. LoRA and other adapters of the weights can."
                )
            model = model.base_model.model  # type: ignore[assignment, union-attr]
        else:
            return model


def family_key(model: nn.Module) -> str | None:
    """The key of a model's family in `FAMILIES`, or None."""
    if any(c.__name__ == "VisionTransformer" and c.__module__.startswith("timm.") for c in type(model).__mro__):
        return "timm"
    key = getattr(getattr(model, "config", None), "model_type", None)
    return key if key in FAMILIES else None


def supported() -> str:
    """The supported families as one phrase."""
    return ", ".join(family.title for family in FAMILIES.values())


def anatomy(model: nn.Module) -> Anatomy:
    """Read a model through the table of families.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> body = anatomy(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=50)))
    >>> body.family.title, len(body.layers), body.layers[0].units, body.layers[0].width
    ('GPT-2', 2, 4, 8)
    """
    if not isinstance(model, nn.Module):
        raise UnderstudyError(
            f"A model must be a torch.nn.Module, but a {type(model).__name__} was given; "
            "load one by name with understudy.load(...)."
        )
    model = unwrap(model)
    key = family_key(model)
    if key is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        given = f"{type(model).__name__}" + (f" (model_type {kind!r})" if kind else "")
        raise UnderstudyError(
            f"{given} is of no known family. Supported: {supported()}. "
            "To add one, add an entry to understudy.anatomy.FAMILIES and run `understudy check` on the model."
        )
    family = FAMILIES[key]
    base: nn.Module = model if key == "timm" else model.base_model  # type: ignore[assignment]
    try:
        blocks = family.blocks(base)
    except AttributeError as missing:
        raise UnderstudyError(f"{type(model).__name__} is not built as {family.title} is: {missing}.") from missing
    layers = tuple(_layer(family, base, index, block) for index, block in enumerate(blocks))
    return Anatomy(model, base, family, layers, layers)


def _layer(family: Family, base: nn.Module, index: int, block: nn.Module) -> Layer:
    path = family.beside(getattr(base, "config", None))
    try:
        attention, site = attrgetter(family.attention)(block), attrgetter(family.site)(block)
        beside = attrgetter(path)(block) if path else None
    except AttributeError as missing:
        raise UnderstudyError(
            f"Layer {index} ({type(block).__name__}) is not built as {family.title} is: {missing}. "
            f"Supported: {supported()}."
        ) from missing
    units, size = family.heads(base, block), site_width(site)
    if units < 1 or size % units:
        raise UnderstudyError(
            f"The output projection of layer {index} reads {size} values, which {units} heads do not divide: "
            "the head count in the config does not fit the weights."
        )
    return Layer(index, block, attention, site, beside, units, size // units, pair=family.weights, close=family.close)


def _grouped(layer: Layer, groups: int) -> Layer:
    """Query heads that share keys and values, as one unit: they lie side by side."""
    return replace(layer, units=groups, width=layer.units * layer.width // groups)


def _neurons(family: Family, layer: Layer, count: int) -> Layer:
    """The MLP's hidden neurons in blocks, at its down projection; the attention answers what was captured."""
    for path in family.down:
        try:
            site = attrgetter(path)(layer.block)
            mlp = attrgetter(family.mlp)(layer.block)
            break
        except AttributeError:
            continue
    else:
        raise UnderstudyError(
            f"Layer {layer.index} ({type(layer.block).__name__}) has no down projection at {' or '.join(family.down)}: "
            "its neurons cannot be gated."
        )
    size = site_width(site)
    if size % count:
        raise UnderstudyError(
            f"The {size} neurons of layer {layer.index} cannot be cut into {count} equal blocks: choose a divisor."
        )
    attended = attrgetter(family.attended or family.attention)(layer.block)
    return Layer(layer.index, layer.block, mlp, site, attended, count, size // count, beside_pair=family.weights)


def site_width(site: nn.Module) -> int:
    """How many values a site reads: `in_features`, or the rows of a Conv1D's weight."""
    if hasattr(site, "in_features"):
        return int(site.in_features)  # type: ignore[arg-type]
    weight = getattr(site, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise UnderstudyError(f"{type(site).__name__} is not a linear map: no unit can be cut from its input.")
    return int(weight.shape[0])
