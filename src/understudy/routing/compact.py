"""Attention that computes only the heads an input keeps: their queries, keys, values, scores and projection."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle

from understudy.anatomy import FAMILIES, Anatomy, Layer, family_key
from understudy.errors import UnderstudyError
from understudy.routing.builds import BUILDS, Build, Weights, implementation, obstacle, picked, weights
from understudy.surgery import eager, hooked, replaced

Choose = Callable[[Tensor], Tensor]  # from a block's input [inputs, tokens, width] to the heads kept [inputs, K]
Way = Literal["auto", "heads", "gathered"]

# Head by head pays for two calls for each kept head of each input, gathering for a copy of the head's weights. On two
# CPU cores the calls are the smaller part from about this many numbers in one of a head's matrices (unit x width).
_LARGE = 2**13

# Arguments of an attention's forward that would ask for more than self-attention of the tokens at hand.
_BEYOND = ("encoder_hidden_states", "position_bias", "softcap", "cache")


class Setting(NamedTuple):
    """What a call says about the attention itself."""

    mask: Tensor | None
    causal: bool
    dropout: float


class CompactAttention:
    """The attention of one layer for the heads that each input keeps: the same numbers as with gates of zero.

    >>> import understudy as us
    >>> from understudy.anatomy import anatomy
    >>> part = compact(anatomy(us.load("digits")), 0)
    >>> hidden = torch.randn(2, 17, part.layer.units * part.layer.width)
    >>> with torch.no_grad():
    ...     part.run(hidden, torch.tensor([[0, 3], [1, 2]])).shape == hidden.shape
    True

    The weights stay the module's own and are read at each run. way: how it is computed.

    - "heads": head by head, ordinary products over the tokens of one input; only the query, key and value weights of
      a head are brought together, once for all inputs that keep it.
    - "gathered": each input's weights are gathered, and all inputs go through batched products.
    - "auto": "heads" on a CPU, unless the heads are very small; "gathered" on accelerators, and where gradients or
      autocast are wanted.
    """

    def __init__(self, layer: Layer, build: Build, way: Way = "auto") -> None:
        self.layer, self.build, self.way = layer, build, way
        self._signature = inspect.signature(type(layer.attention).forward)

    def run(self, hidden: Tensor, kept: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The attention module's output for its normed input `[inputs, tokens, width]`.

        kept: for each input the heads that it keeps, whole numbers `[inputs, K]`; in a row no head twice. The rest is
        what the module's own forward takes beside its input.
        """
        setting = self._setting(hidden, args, kwargs)
        self._check(kept, len(hidden))
        own = weights(self.layer, self.build)
        if self._by_heads(hidden, own):
            output = self._head_by_head(hidden, kept, own, setting)
        else:
            output = self._gathered(hidden, kept.to(hidden.device), own, setting)
        after = self.build.after
        return output if after is None else attrgetter(after)(self.layer.attention)(output)

    def _by_heads(self, hidden: Tensor, own: Weights) -> bool:
        if self.way != "auto":
            return self.way == "heads"
        if hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        parts = (hidden, *own.into, own.out)
        if torch.is_grad_enabled() and any(value.requires_grad for value in parts):
            return False  # products that write in place have no gradient
        return own.into[0][0].numel() >= _LARGE

    def _head_by_head(self, hidden: Tensor, kept: Tensor, own: Weights, setting: Setting) -> Tensor:
        rows = kept.tolist()
        inputs, tokens, _ = hidden.shape
        unit = self.layer.width
        blocks = own.together(sorted({head for row in rows for head in row}))
        qkv = hidden.new_empty(inputs, kept.shape[1], tokens, 3 * unit)
        for x, row, parts in zip(hidden, rows, qkv, strict=True):
            for head, part in zip(row, parts, strict=True):
                _affine(x, *blocks[head], out=part)
        q, k, v = qkv.view(*qkv.shape[:-1], 3, unit).unbind(-2)  # [inputs, K, tokens, unit]
        mixed = self._attend(q, k, v, kept, setting)
        output = hidden.new_empty(inputs, tokens, own.out.shape[-1])
        for row, parts, total in zip(rows, mixed, output, strict=True):
            _affine(parts[0], own.out[row[0]], own.bias, out=total)
            for head, part in zip(row[1:], parts[1:], strict=True):
                total.addmm_(part, own.out[head])
        return output

    def _gathered(self, hidden: Tensor, kept: Tensor, own: Weights, setting: Setting) -> Tensor:
        shape = (*hidden.shape[:2], kept.shape[1], self.layer.width)
        biases: Sequence[Tensor | None] = own.biases or (None, None, None)
        q, k, v = (
            _batched(hidden, picked(part, kept).mT, None if bias is None else bias[kept].flatten(1)[:, None])
            .view(shape)
            .transpose(1, 2)
            for part, bias in zip(own.into, biases, strict=True)
        )  # [inputs, K, tokens, unit]
        mixed = self._attend(q, k, v, kept, setting).transpose(1, 2).flatten(2)  # [inputs, tokens, K * unit]
        return _batched(mixed, picked(own.out, kept), own.bias)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, setting: Setting) -> Tensor:
        attention, mask = self.layer.attention, setting.mask
        if self.build.norms:
            of_query, of_key = (attrgetter(name)(attention) for name in self.build.norms)
            q, k = of_query(q), of_key(k)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:  # its own for each head
            each = mask.expand(len(kept), self.layer.units, *mask.shape[-2:])
            mask = each[torch.arange(len(kept), device=mask.device)[:, None], kept.to(mask.device)]
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=setting.dropout,
            is_causal=setting.causal,
            scale=attrgetter(self.build.scale)(attention),
        )

    def _setting(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Setting:
        attention = self.layer.attention
        given = self._signature.bind(attention, hidden, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if given.get("past_key_values") is not None:
            raise UnderstudyError(
                f"Layer {self.layer.index} runs only the heads that are kept, and the others would be missing from a "
                "key-value cache: call the model, or generate, with use_cache=False, or "
                "set the other heads to zero (execution='gated' of understudy.routed)."
            )
        beyond = [name for name in _BEYOND if given.get(name) is not None]
        if beyond:
            raise UnderstudyError(
                f"Layer {self.layer.index} was called with {', '.join(beyond)}, which kept heads alone cannot compute: "
                "use gates (understudy.gated)."
            )
        mask, causal = given.get(self.build.mask), given.get("is_causal")
        causal = bool(getattr(attention, "is_causal", False) if causal is None else causal)
        causal = causal and implementation(attention) == "sdpa"  # "eager" knows only its mask
        dropout = float(attrgetter(self.build.dropout)(attention)) if attention.training else 0.0
        return Setting(mask, causal and mask is None and hidden.shape[1] > 1, dropout)

    def _check(self, kept: Tensor, inputs: int) -> None:
        index, heads = self.layer.index, self.layer.units
        if kept.ndim != 2 or kept.shape[0] != inputs or not 1 <= kept.shape[1] <= heads or kept.dtype != torch.long:
            raise UnderstudyError(
                f"The heads kept at layer {index} must be whole numbers (int64) of the shape [inputs, K], here "
                f"[{inputs}, 1 to {heads}], but {str(kept.dtype).removeprefix('torch.')} {list(kept.shape)} was given."
            )
        if kept.device.type != "cpu":
            return  # to look at the numbers would make an accelerator wait
        ordered = kept.sort(-1).values
        if bool((ordered[:, 0] < 0).any() | (ordered[:, -1] >= heads).any() | (ordered.diff() == 0).any()):
            raise UnderstudyError(
                f"Layer {index} has the heads 0 to {heads - 1}, and an input keeps each at most once, but the kept "
                "heads say otherwise."
            )


def compact(body: Anatomy, index: int, *, way: Way = "auto") -> CompactAttention:
    """The attention of a layer, to be run for kept heads only; layers count from zero, negatives from the end."""
    layer = body.layers[body.layer_index(index)]
    if way not in ("auto", "heads", "gathered"):
        raise UnderstudyError(f"way={way!r} is not possible: say 'auto', 'heads' or 'gathered'.")
    reason = obstacle(body, layer)
    if reason is not None:
        families = ", ".join(FAMILIES[key].title for key in BUILDS)
        raise UnderstudyError(
            f"Layer {layer.index} of {type(body.model).__name__} cannot run kept heads alone: {reason}. This works "
            f"for {families} as their libraries build them; for others use gates (understudy.gated), which remove "
            "heads at the full cost."
        )
    return CompactAttention(layer, BUILDS[str(family_key(body.model))], way)


@contextmanager
def compacted(body: Anatomy, layers: Mapping[int, Choose], *, way: Way = "auto") -> Iterator[nn.Module]:
    """Run a model with the attention of some layers computed for kept heads only.

    >>> import understudy as us
    >>> from understudy.anatomy import anatomy
    >>> model = us.load("digits")
    >>> def choose(residual):  # a router: the same two heads for every input here
    ...     return torch.tensor([0, 3]).expand(len(residual), 2)
    >>> with torch.no_grad(), compacted(anatomy(model), {0: choose, -1: choose}):
    ...     logits = model(**us.digits(4).batch(range(4))).logits

    layers: for each, what chooses: it gets the block's input `[inputs, tokens, width]` and returns the heads kept,
    `[inputs, K]`. The rest of the forward is the model's own, which is as before afterwards. A key-value cache is not
    filled: a plain call makes none, and one that is given is refused. It is an error if no forward ran a layer.
    """
    parts: dict[int, CompactAttention] = {}
    choosers: dict[int, Choose] = {}
    for place, choose in layers.items():
        index = body.layer_index(place)
        if index in parts:
            raise UnderstudyError(f"Layer {index} was given twice.")
        parts[index], choosers[index] = compact(body, index, way=way), choose
    kept: dict[int, Tensor] = {}
    ran: set[int] = set()

    def forward(part: CompactAttention) -> Callable[..., Any]:
        index = part.layer.index

        def attention(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if index not in kept:
                raise UnderstudyError(f"The attention of layer {index} was called alone: run the model, or its block.")
            output = part.run(hidden, kept.pop(index), *args, **kwargs)
            ran.add(index)
            return (output, None) if part.layer.pair else output

        return attention

    def without_cache(
        _base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs if kwargs.get("use_cache") is not None else {**kwargs, "use_cache": False}

    def hooks() -> Iterator[RemovableHandle]:
        if "use_cache" in inspect.signature(type(body.base).forward).parameters:
            # Said to each forward; a changed config would make it another model to whoever asks for its fingerprint.
            yield body.base.register_forward_pre_hook(without_cache, with_kwargs=True)
        yield from choosing(body, choosers, kept)

    changes = ((part.layer.attention, "forward", forward(part)) for part in parts.values())
    with eager(body.model), hooked(hooks()), replaced(changes):
        yield body.model
    refuse_silent(parts, ran)


def choosing(body: Anatomy, choosers: Mapping[int, Choose], kept: dict[int, Tensor]) -> Iterator[RemovableHandle]:
    """Hooks that ask, before each block, what it keeps, after the user's own hooks, which may change its input."""

    def before_block(index: int) -> Callable[..., None]:
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            kept[index] = choosers[index](args[0] if args else kwargs["hidden_states"])

        return hook

    for index in choosers:
        yield body.layers[index].block.register_forward_pre_hook(before_block(index), with_kwargs=True)


def refuse_silent(layers: Iterable[int], ran: set[int]) -> None:
    """Say so where no forward ran a layer for which heads were to be chosen."""
    silent = sorted(set(layers) - ran)
    if silent:
        raise UnderstudyError(
            f"Heads were to be chosen at layer {', '.join(map(str, silent))}, but no forward of the model ran there: "
            "run the model inside the `with`."
        )


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _batched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
