"""What could be known of an input's CFS without intervening: the features of each source of information."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from understudy import head
from understudy.anatomy import Anatomy, Layer
from understudy.errors import UnderstudyError
from understudy.lens.parameters import projections
from understudy.lens.passes import Given, opened, targets, walk
from understudy.meter import Progress
from understudy.resume import Suffix
from understudy.routing.residual import Places, places, summarize
from understudy.site import linear_map
from understudy.surgery import hooked
from understudy.worker import Captured

# In the order of the paper's table. All but the last are seen on the forward, before the layer is left.
SOURCES = ("residual", "qk", "logits", "values", "AV", "contributions", "gradient")
FORWARD = SOURCES[:-1]

CLASSES = 10  # whose log-probabilities are differentiated
_HELD = 2**24  # numbers of logits at once
_NOTHING = 1e-12  # a slope that is none


def features(
    model: nn.Module, inputs: Given, *, layer: int = -1, outcome: str = "auto", progress: Progress | None = None
) -> dict[str, Tensor]:
    """The features of every source of information at a layer, float32 `[inputs, numbers]` each.

    >>> import understudy as us
    >>> {name: value.shape[1] for name, value in features(us.load("digits"), us.digits(4)).items()}
    {'residual': 144, 'qk': 288, 'logits': 72, 'values': 144, 'AV': 144, 'contributions': 864, 'gradient': 73}

    | source | what is seen at each token |
    |---|---|
    | `residual` | the block's input, as a router sees it |
    | `qk` | queries and keys of each head |
    | `logits` | of each head's row of scaled `q·k`: mean, variance, largest, and the entropy of its softmax |
    | `values` | values of each head |
    | `AV` | each head's output before the output projection |
    | `contributions` | each head's contribution `c_j` to the residual stream, after it |

    All are summed up alike over tokens, as [anchor; mean; variance] (`routing.residual.summarize`), so that they differ
    in what they show and not in how. A row of logits has the keys that its query may see. Padding counts nowhere.

    `gradient` is for analysis only, since it takes backward passes, all at gates of one. Of the task's loss L, the
    slopes `∂L/∂g_j`: the gradient at the attention's output along each `c_j`. Of the log-probabilities of classes, each
    head's profile `sqrt(p_c) · ∂log p_c/∂g_j`, whose square is its share of the Fisher information. The classes are all
    in their order where they are at most ten, else the ten that the dense model finds likeliest. Slopes differ by
    orders of magnitude between inputs: each vector is given as its direction and the logarithm of its length.

    Heads that share keys and values repeat them. Norms of queries and keys are applied, rotary positions and sliding
    windows are not.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in SOURCES}
    with opened(model, inputs, layers=layer, outcome=outcome) as worker:
        body, (index,) = worker.body, worker.protocol.layers

        def keep(found: Mapping[str, Tensor]) -> None:
            for name, value in found.items():
                parts[name].append(value.float().cpu())

        with _entering(body, index) as entered:

            def before(captured: Captured) -> None:
                at = places(body, captured.taken.batch, worker.protocol.outcome, captured.taken.tokens)
                keep(_seen(body, index, captured, entered(), at))

            for captured, suffix in walk(worker, progress, before):
                keep({"gradient": _gradient(suffix, targets(worker, captured, suffix))})
    return {name: torch.cat(value) for name, value in parts.items()}


def queries_keys_values(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every head, from the attention's own input `[inputs, tokens, width]`: `[inputs, heads, tokens, unit]` each.

    In float32 at least. Keys and values of a group are repeated for its heads.
    """
    maps = projections(layer)
    if maps is None:
        raise UnderstudyError(
            f"The queries, keys and values of layer {layer.index} ({type(layer.attention).__name__}) are not known: "
            "its maps to them have no name that understudy.lens.parameters knows."
        )
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden.to(dtype)
    q, k, v = (
        torch.einsum("btd,hud->bhtu", hidden, one.weight.to(hidden)) + one.bias.to(hidden)[:, None] for one in maps
    )
    return _normed(layer, "q_norm", q), _normed(layer, "k_norm", k), v


def scores(layer: Layer, q: Tensor, k: Tensor) -> Tensor:
    """The attention's logits, `q·k` times its scale: `[..., queries, keys]`."""
    named = (getattr(layer.attention, name, None) for name in ("scaling", "scale"))
    scale = next((float(value) for value in named if isinstance(value, float)), layer.width**-0.5)
    return scale * q @ k.mT


def visible(layer: Layer, real: Tensor) -> Tensor:
    """Which keys a query may see, bool `[inputs, queries, keys]`: those that are no padding, and not ahead of it."""
    see = real[:, None].expand(-1, real.shape[1], -1)
    return see.tril() if getattr(layer.attention, "is_causal", False) else see


def _seen(body: Anatomy, index: int, captured: Captured, entered: Tensor, at: Places) -> dict[str, Tensor]:
    """The features of the forward, for one batch."""
    layer, state = body.layers[index], captured.taken.sites[index]
    q, k, v = queries_keys_values(layer, entered)
    real = at.rest if body.reads_text else torch.ones_like(at.rest)
    see = visible(layer, real.to(q.device))
    inner = state.inner.to(q.dtype).view(*state.inner.shape[:2], layer.units, layer.width).transpose(1, 2)
    weight = linear_map(layer, state.inner)[0].to(q.dtype).view(layer.units, layer.width, -1)
    heads = range(layer.units)  # one at a time: all contributions, or all maps, of a batch are many
    return {
        "residual": summarize(state.residual, at),
        "qk": torch.cat([summarize(_by_token(part), at) for part in (q, k)], -1),
        "logits": torch.cat([summarize(_rows(scores(layer, q[:, h], k[:, h]), see), at) for h in heads], -1),
        "values": summarize(_by_token(v), at),
        "AV": summarize(_by_token(inner), at),
        "contributions": torch.cat([summarize(inner[:, h] @ weight[h], at) for h in heads], -1),
    }


def _rows(z: Tensor, see: Tensor) -> Tensor:
    """What is said of each row of logits: `[inputs, queries, 4]`; zeros where a query sees nothing."""
    count = see.sum(-1).clamp(min=1)
    mean = (z * see).sum(-1) / count
    variance = ((z - mean[..., None]).square() * see).sum(-1) / count
    masked = z.masked_fill(~see, torch.finfo(z.dtype).min)
    entropy = torch.special.entr(masked.softmax(-1)).sum(-1)
    rows = torch.stack([mean, variance, masked.amax(-1), entropy], -1)
    return rows.masked_fill(~see.any(-1, keepdim=True), 0)


def _gradient(suffix: Suffix, towards: Tensor) -> Tensor:
    """Slopes of the loss over units, and of each unit over classes: `[inputs, 1 + units + units · (classes + 1)]`."""
    count, units = suffix.taken.count, suffix.layer.units
    gates, owner = torch.ones(count, units), torch.arange(count)

    def slopes(aim: Tensor) -> Tensor:
        return suffix.slopes(gates, owner, towards=aim)[1]  # [inputs, units]

    classes, p = _classes(suffix)
    profile = torch.stack([slopes(aim) for aim in classes.unbind(-1)], -1) * p[:, None].sqrt()
    return torch.cat([_polar(slopes(towards)), _polar(-profile).flatten(1)], -1)


def _classes(suffix: Suffix) -> tuple[Tensor, Tensor]:
    """The classes of each distribution, `[distributions, classes]`, and their dense probability `[inputs, classes]`."""
    few = suffix.classes <= CLASSES
    step = max(1, _HELD // suffix.classes)
    found, shares = [], []
    for start in range(0, len(suffix.final), step):
        logits = head.logits(suffix.body, suffix.final[start : start + step])
        p = (logits if logits.ndim == 2 else logits[:, 0]).double().softmax(-1)
        best = torch.arange(suffix.classes, device=p.device).expand_as(p) if few else p.topk(CLASSES).indices
        found.append(best)
        shares.append(p.gather(-1, best))
    share, reads = torch.cat(shares), suffix.reads
    total = share.new_zeros(suffix.taken.count, share.shape[1]).index_add_(0, reads.owner.to(share.device), share)
    return torch.cat(found), total / torch.tensor(reads.counts, device=share.device)[:, None]


def _polar(vectors: Tensor) -> Tensor:
    """The direction of each vector of the last axis, and behind it the logarithm of its length."""
    length = vectors.norm(dim=-1, keepdim=True).clamp(min=_NOTHING)
    return torch.cat([vectors / length, length.log()], -1)


def _by_token(parts: Tensor) -> Tensor:
    """`[inputs, heads, tokens, unit] -> [inputs, tokens, heads · unit]`."""
    return parts.transpose(1, 2).flatten(2)


def _normed(layer: Layer, name: str, parts: Tensor) -> Tensor:
    norm = getattr(layer.attention, name, None)
    if not isinstance(norm, nn.Module):
        return parts
    weight = next(iter(norm.parameters()), parts)
    normed: Tensor = norm(parts.to(weight.dtype))
    return normed.to(parts.dtype)


@contextmanager
def _entering(body: Anatomy, index: int) -> Iterator[Callable[[], Tensor]]:
    """A way to ask, right after a forward, what the attention of a layer was given in it."""
    attention = body.layers[index].attention
    shared = [layer.index for layer in body.layers if layer.attention is attention]
    # A shared module is called once for each of its layers. Only the last calls are kept: resuming calls it too.
    calls: deque[Tensor] = deque(maxlen=len(shared))

    def hook(_attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        calls.append(args[0] if args else kwargs["hidden_states"])

    with hooked([attention.register_forward_pre_hook(hook, with_kwargs=True)]):
        yield lambda: calls[shared.index(index)]
