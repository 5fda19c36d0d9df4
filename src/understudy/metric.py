"""How good a model is at its task: accuracy, or the loss of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from understudy import outcome as outcomes
from understudy.anatomy import Anatomy, anatomy
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs
from understudy.meter import Meter, Progress
from understudy.surgery import opened

# Logits held at once: of a vocabulary of 150,000, about seven contexts of 128 tokens.
_HELD = 2**27
_TOGETHER = 64  # inputs that are loaded at once


@dataclass(frozen=True)
class Metric:
    """A task metric: what it is, its value, and over how many predictions."""

    name: str
    value: float
    count: int


def task_metric(model: nn.Module, inputs: Inputs, *, progress: Progress | None = None) -> Metric:
    """The share of inputs whose label is the most likely class; for language models the mean loss in nats.

    >>> import understudy as us
    >>> task_metric(us.load("digits"), us.digits(64)).name
    'accuracy'

    A masked model predicts its masked tokens, a causal one every next token that is no padding. The model's own
    forward runs, in evaluation mode.
    """
    body = anatomy(model)
    kind = outcomes.resolve(body, "auto")
    total, count = 0.0, 0
    meter = Meter(progress, len(inputs))
    with opened(body.model):
        for start in range(0, len(inputs), _TOGETHER):
            whole = inputs.batch(range(start, min(start + _TOGETHER, len(inputs))))
            size = len(next(iter(whole.values())))
            for first in range(0, size, step := _rows(body, whole)):
                batch = {key: value[first : first + step] for key, value in whole.items()}
                logits, wanted = _predictions(body, batch, kind)
                if kind == "classes":
                    total += float((logits.argmax(-1) == wanted).sum())
                else:
                    total += float(cross_entropy(logits.float(), wanted, reduction="none").double().sum())
                count += len(wanted)
            meter.close(size)
    if not count:
        raise UnderstudyError("There is nothing to score: the texts have no token that follows another.")
    return Metric("accuracy" if kind == "classes" else "loss", total / count, count)


def _rows(body: Anatomy, batch: Batch) -> int:
    """How many inputs run at once: the logits of a large vocabulary are cut."""
    if not body.reads_text:
        return _TOGETHER
    tokens, vocabulary = batch["input_ids"].shape[1], int(getattr(body.base.config, "vocab_size", 1))
    return max(1, min(_TOGETHER, _HELD // (tokens * vocabulary)))


def _predictions(body: Anatomy, batch: Batch, kind: str) -> tuple[Tensor, Tensor]:
    """The logits `[predictions, classes]` that are scored, and what they should have said."""
    arguments = body.arguments(batch)
    answer = body.run(arguments)
    logits = answer if isinstance(answer, Tensor) else answer.logits
    if kind == "next":
        ids = arguments["input_ids"]
        real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
        scored = real[:, :-1] & real[:, 1:]
        return logits[:, :-1][scored], ids[:, 1:][scored]
    labels = batch.get("labels")
    if labels is None:
        raise UnderstudyError(
            "These inputs bring no labels, so how good the model is cannot be said: give labelled pictures "
            "(--labels), or texts."
        )
    labels = labels.to(logits.device)
    if kind == "classes":
        return logits, labels
    scored = labels >= 0
    return logits[scored], labels[scored]
