"""What is compared: which predictive distributions of the model are the outcome, and which tokens they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from understudy import head
from understudy.anatomy import Anatomy
from understudy.capture import Capture
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch

Outcome = Literal["classes", "masked", "next", "last"]

# What each head can be asked for; the first is what "auto" takes.
_POSSIBLE: dict[str, tuple[Outcome, ...]] = {
    "classification": ("classes",),
    "masked-language": ("masked",),
    "causal-language": ("next", "last"),
}


@dataclass(frozen=True)
class Reads:
    """The distributions of a batch, each with the tokens of the final hidden state that it reads.

    tokens: `[distributions, n]`, sorted by input. owner: `[distributions]`, their input.
    counts: how many distributions each input has; the outcome's divergence is their mean.
    """

    tokens: Tensor
    owner: Tensor
    counts: tuple[int, ...]

    def gather(self, hidden: Tensor) -> Tensor:
        """The tokens read, from `[inputs, tokens, width]`: `[distributions, n, width]`."""
        return hidden[self.owner[:, None], self.tokens]


def resolve(body: Anatomy, outcome: str) -> Outcome:
    """The outcome that is meant, checked against the model's head."""
    kind = _head_kind(body)
    if kind is None:
        raise UnderstudyError(
            f"{type(body.model).__name__} has no head that predicts a distribution, so there is no outcome to compare. "
            "Load it with a classification, masked-language or causal-language head."
        )
    possible = _POSSIBLE[kind]
    if outcome == "auto":
        return possible[0]
    for choice in possible:
        if outcome == choice:
            return choice
    raise UnderstudyError(
        f"Outcome {outcome!r} is not one that {type(body.model).__name__} has: its {kind} head gives "
        f"{' or '.join(map(repr, possible))} (or 'auto')."
    )


def reads(body: Anatomy, taken: Capture, outcome: Outcome, ids: Sequence[str]) -> Reads:
    """Which tokens the outcome reads for each captured input."""
    if outcome == "classes":
        if "positions" in taken.batch:
            raise UnderstudyError(
                "The batch has positions, but classes are not predicted at positions: leave them out."
            )
        return _class_reads(body, taken)
    chosen = positions(body, taken.batch, outcome)
    counts = chosen.sum(-1)
    if not bool(counts.all()):
        empty = ids[int((counts == 0).nonzero()[0])]
        if outcome == "masked":
            raise UnderstudyError(
                f"Input {empty!r} has no masked token: mask some, with masked_texts(...) or --masked-texts, "
                "or give their positions."
            )
        raise UnderstudyError(f"Input {empty!r} has no token that is not padding: there is nothing to compare.")
    owner, tokens = chosen.nonzero(as_tuple=True)
    return Reads(tokens[:, None].to(body.device), owner.to(body.device), tuple(counts.tolist()))


def _class_reads(body: Anatomy, taken: Capture) -> Reads:
    """The tokens that the class head reads, where it can do with these alone; else all of them."""
    ids = taken.batch.get("input_ids")
    mask = head.tokens_read(body, taken.final, ids=None if ids is None else ids.to(body.device))
    owner = torch.arange(taken.count, device=mask.device)
    counts = mask.sum(-1)
    if bool((counts == counts[0]).all()) and 0 < int(counts[0]) < taken.tokens:
        tokens = mask.nonzero()[:, 1].view(taken.count, -1)
        # A pool that leaves out the class token by its place would leave out another one in its absence.
        if bool(head.tokens_read(body, taken.final[owner[:, None], tokens]).all()):
            return Reads(tokens, owner, (1,) * taken.count)
    return Reads(torch.arange(taken.tokens, device=mask.device).expand(taken.count, -1), owner, (1,) * taken.count)


def positions(body: Anatomy, batch: Batch, outcome: Outcome) -> Tensor:
    """The tokens whose distributions are the outcome: bool `[inputs, tokens]`."""
    ids, real = batch["input_ids"], batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if real is None or real.ndim != 2 else real.bool()
    chosen = batch.get("positions")
    if chosen is not None:
        if chosen.shape != ids.shape:
            raise UnderstudyError(
                f"positions must hold one bool for each of the {ids.shape[1]} tokens of an input, "
                f"but are {list(chosen.shape[1:])} for each."
            )
        real = real & chosen.bool()
    elif outcome == "masked":
        real = real & (ids == _mask_token(body))
    if outcome == "last":
        index = torch.arange(ids.shape[1], device=real.device)
        return real & (index == (index * real).amax(-1, keepdim=True))
    return real


def _mask_token(body: Anatomy) -> int:
    token = getattr(body.base.config, "mask_token_id", None)
    name = str(getattr(body.model, "name_or_path", ""))
    if token is None and name:
        from transformers import AutoTokenizer

        try:
            token = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False).mask_token_id
        except (OSError, ValueError):
            token = None
    if token is None:
        raise UnderstudyError(
            "Which tokens are masked is not known: the model brings no tokenizer with a mask token. "
            "Add `positions` to the batch, bool [inputs, tokens], true at the masked tokens."
        )
    return int(token)


def _head_kind(body: Anatomy) -> str | None:
    if not body.reads_text and not hasattr(body.model, "config"):
        return "classification" if getattr(body.model, "num_classes", 0) else None
    from transformers.models.auto import modeling_auto as auto

    kinds = {
        "classification": (
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        ),
        "masked-language": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES),
        "causal-language": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
    }
    names = {parent.__name__ for parent in type(body.model).__mro__}
    # Pretraining classes repeat causal ones (GPT2LMHeadModel), so the causal table is asked first.
    for kind in ("causal-language", "classification", "masked-language"):
        for table in kinds[kind]:
            entries = {n for value in table.values() for n in ((value,) if isinstance(value, str) else value)}
            if names & entries:
                return kind
    return None
