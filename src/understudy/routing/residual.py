"""What a router sees: a summary of the residual stream before a layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.anatomy import Anatomy, family_key
from understudy.inputs.batch import Batch
from understudy.outcome import Outcome, positions

# Families whose classifier reads the first token of a text; others read the last.
_FIRST = ("bert", "roberta", "albert", "distilbert")
# Tokens before the patches.
_PREFIX = {"deit": 2}


@dataclass(frozen=True)
class Places:
    """The tokens of a summary, bool `[inputs, tokens]` each. anchor: what the outcome hangs on; rest: the others."""

    anchor: Tensor
    rest: Tensor


def places(body: Anatomy, batch: Batch, outcome: Outcome, tokens: int) -> Places:
    """The tokens of a batch that are summed up.

    Pictures: the class token, and the patches. Texts: the masked tokens, the last token, or the one that a classifier
    reads; and all that are no padding.
    """
    if not body.reads_text:
        count = len(next(iter(batch.values())))
        index = torch.arange(tokens).expand(count, tokens)
        before = _prefix(body)
        return Places(index == 0 if before else index >= 0, index >= before)
    given = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        real = torch.ones(len(given), tokens, dtype=torch.bool, device=given.device)
    else:
        real = mask[:, -tokens:].bool()  # beside a key-value cache, the mask is longer than the tokens at hand
    if outcome == "masked":
        return Places(positions(body, batch, outcome), real)
    index = torch.arange(tokens, device=given.device)
    if outcome == "classes" and family_key(body.model) in _FIRST:
        return Places((index == 0).expand_as(real), real)
    return Places(real & (index == (index * real).amax(-1, keepdim=True)), real)


@torch.no_grad()
def summarize(residual: Tensor, at: Places) -> Tensor:
    """The router's input: `z = [anchor; mean; variance]`, from `[inputs, tokens, width]` to `[inputs, 3 · width]`.

    >>> residual = torch.tensor([[[1.0], [2.0], [4.0]]])
    >>> at = Places(torch.tensor([[True, False, False]]), torch.tensor([[False, True, True]]))
    >>> summarize(residual, at)
    tensor([[1., 3., 1.]])
    """
    with torch.autocast(residual.device.type, enabled=False):  # the same numbers whatever the model runs under
        return _summary(residual.float(), at)


def _summary(X: Tensor, at: Places) -> Tensor:
    anchor, rest = (_shares(mask.to(X.device)) for mask in (at.anchor, at.rest))
    rows = []
    spare = torch.empty_like(X[0])  # fresh memory for each input would take longer than the sums
    # Input by input, as products with a vector: a fraction of the time that sums over a batch's middle axis take.
    for x, first, others in zip(X, anchor, rest, strict=True):
        mean = others @ x
        rows.append(torch.cat([first @ x, mean, others @ torch.sub(x, mean, out=spare).square_()]))
    return torch.stack(rows)


def _shares(mask: Tensor) -> Tensor:
    """Each chosen token's share of the mean over them."""
    return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


def _prefix(body: Anatomy) -> int:
    """How many tokens stand before the patches."""
    if family_key(body.model) == "timm":
        return int(getattr(body.model, "num_prefix_tokens", 1))
    registers = int(getattr(getattr(body.base, "config", None), "num_register_tokens", 0) or 0)
    return _PREFIX.get(family_key(body.model) or "", 1) + registers
