"""The same inputs, changed a little: what stays of a relation tells how much of it is the input's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch, Inputs

# Pictures: each channel brighter or darker by a little; mirrored; moved by a pixel. Texts: a share of tokens replaced.
KINDS = ("colour", "flip", "shift", "replace:0.03", "replace:0.2")


def perturbed(inputs: Inputs, kind: str, *, seed: int = 0) -> Inputs:
    """Inputs of the same ids, each changed in the same way every time.

    >>> import understudy as us
    >>> from understudy.inputs.perturbed import perturbed
    >>> perturbed(us.digits(2), "shift").ids == us.digits(2).ids
    True

    kind: "colour" (each channel of a picture scaled by 0.95 to 1.05 and moved by up to 0.05), "flip" (mirrored, left to
    right), "shift" (moved by one pixel), or "replace:SHARE" (that share of a text's tokens replaced by other tokens of
    the same text; positions that are compared, the first and the last token, and padding stay).
    """
    name, _, number = kind.partition(":")
    try:
        share = float(number) if number else 0.0
    except ValueError:
        share = -1.0
    if name not in ("colour", "flip", "shift", "replace") or (name == "replace") != (0 < share <= 1):
        raise UnderstudyError(f"Perturbation {kind!r} is not possible: say colour, flip, shift or replace:SHARE.")

    def load(indices: Sequence[int]) -> Batch:
        batch = dict(inputs.batch(indices))
        what = "input_ids" if name == "replace" else "pixel_values"
        if what not in batch:
            raise UnderstudyError(f"Perturbation {kind!r} needs {what}, but the inputs have {', '.join(batch)}.")
        rows = [_changed(name, share, batch, row, _generator(seed, index)) for row, index in enumerate(indices)]
        batch[what] = torch.stack(rows)
        return batch

    return Inputs(inputs.ids, load, {**inputs.about, "perturbed": kind, "perturbation_seed": seed})


def _changed(name: str, share: float, batch: Batch, row: int, chance: torch.Generator) -> Tensor:
    if name == "replace":
        return _replaced(batch, row, share, chance)
    pixels = batch["pixel_values"][row]
    if name == "flip":
        return torch.flip(pixels, (-1,))
    if name == "shift":
        return torch.nn.functional.pad(pixels[None], (1, 0, 0, 0), mode="replicate")[0, ..., :-1]
    scale, move = (torch.rand(2, len(pixels), 1, 1, generator=chance) - 0.5) / 10
    changed: Tensor = pixels * (1 + scale) + move
    return changed


def _replaced(batch: Batch, row: int, share: float, chance: torch.Generator) -> Tensor:
    ids = batch["input_ids"][row].clone()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[row].bool().clone()
    places = real.nonzero().flatten()
    fixed = torch.zeros_like(real)
    fixed[places[:1]], fixed[places[-1:]] = True, True
    if "positions" in batch:
        fixed |= batch["positions"][row].bool()
    free = (real & ~fixed).nonzero().flatten()
    count = min(len(free), max(1, round(share * len(places))))
    chosen = free[torch.randperm(len(free), generator=chance)[:count]]
    before = batch["input_ids"][row]
    for place in chosen.tolist():
        others = before[free][before[free] != before[place]]
        if len(others):
            ids[place] = others[torch.randint(len(others), (1,), generator=chance)]
    return ids


def _generator(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + index)
