"""The end of the model: from the last block's output to the logits, through the model's own forward."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from understudy.anatomy import Anatomy
from understudy.errors import UnderstudyError
from understudy.surgery import answering, replaced


def logits(body: Anatomy, hidden: Tensor, *, ids: Tensor | None = None) -> Tensor:
    """The logits of final hidden states `[rows, tokens, width]`: `[rows, classes]` or `[rows, tokens, vocabulary]`.

    The user's own forward runs with its embeddings and blocks answering `hidden` at once, so whatever the family or
    the head does after the blocks (norms, poolers, soft caps, two heads averaged) is done as the model does it.
    `ids` are needed only where the head itself looks at them, to find the last token that is no padding.
    """

    def answer(*_args: Any, **_kwargs: Any) -> Tensor:
        return hidden

    changes: list[tuple[object, str, Any]] = []
    for target in [attrgetter(path)(body.base) for path in body.family.embeddings] + [x.block for x in body.layers]:
        if isinstance(target, nn.Module):
            changes += answering(target, answer)
        else:  # a method, such as timm's `_pos_embed`
            changes.append((target.__self__, target.__name__, answer))
    config = getattr(body.base, "config", None)
    if getattr(config, "pad_token_id", 0) is None:
        # Without a padding token, classifiers refuse more than one row; no token is one that never occurs.
        changes.append((config, "pad_token_id", -1))
    with replaced(changes):
        return output_logits(body, body.run({"input_ids": ids} if ids is not None else _nothing(body, hidden)))


def output_logits(body: Anatomy, output: Any) -> Tensor:
    """The logits in what a model returned."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "prediction_logits"):
        if isinstance(value := getattr(output, name, None), Tensor):
            return value
    raise UnderstudyError(
        f"{type(body.model).__name__} returns no logits: it has no head, so there is no outcome to compare. "
        "Load it with a classification, masked-language or causal-language head."
    )


def tokens_read(body: Anatomy, hidden: Tensor, *, ids: Tensor | None = None) -> Tensor:
    """Which tokens of the final hidden states reach the logits: bool `[rows, tokens]`.

    Asked of the head itself: a backward seeded with NaN leaves NaN at every token that is connected to the logits
    and exact zeros elsewhere, even where an activation is saturated (a dead ReLU excepted: then nothing seems read).
    """
    with torch.enable_grad():
        leaf = hidden.detach().clone().requires_grad_()
        answer = logits(body, leaf, ids=ids)
        (gradient,) = torch.autograd.grad(answer, leaf, torch.full_like(answer, torch.nan))
    return gradient.isnan().any(-1)


def _nothing(body: Anatomy, hidden: Tensor) -> dict[str, Tensor]:
    # What the forward is called with: shapes that its checks accept, values that nothing reads.
    if not body.reads_text:
        return {"pixel_values": hidden}
    # Some classifiers look for the last token that is no padding, so no dummy token may be padding.
    padding = getattr(body.base.config, "pad_token_id", None)
    token = torch.tensor(1 if padding == 0 else 0, device=hidden.device)
    return {"input_ids": token.expand(hidden.shape[:2])}
