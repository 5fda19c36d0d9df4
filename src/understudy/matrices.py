"""One layer of a batch of inputs: the drops first, then the pairs whose source is valid."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from understudy.identity import Protocol
from understudy.meter import Meter
from understudy.resume import Suffix, kl_and_bend
from understudy.search import Pairs
from understudy.store import NOISE_FACTOR

log = logging.getLogger(__name__)

# What a search finds of each pair.
PAIRWISE = ("substitutability", "compensation", "damage")

# Takes the place of a divergence that is not a number, so that the search of the other inputs goes on.
_WORST = 1e30


class Faults:
    """Inputs of a batch on which the model's outcome is not a number, each with the first layer that told."""

    def __init__(self, count: int) -> None:
        self.layers: dict[int, int] = {}
        self._count = count

    def mend(self, found: Tensor, owner: Tensor, layer: int) -> Tensor:
        """The numbers of rows, with a very large one in place of those that are none; their inputs are noted."""
        bad = ~found.isfinite()
        if not bool(bad.any()):
            return found
        for index in owner[bad.flatten(1).any(-1) if bad.ndim > 1 else bad].tolist():
            self.layers.setdefault(index, layer)
        return torch.where(bad, _WORST, found)

    def sound(self) -> Tensor:
        """The inputs without a fault."""
        return torch.tensor([index for index in range(self._count) if index not in self.layers], dtype=torch.int64)


def matrices(suffix: Suffix, protocol: Protocol, faults: Faults, meter: Meter) -> dict[str, Tensor]:
    """The variables of one layer for every input of a batch, NaN where an input has a fault."""
    count, units, layer = suffix.taken.count, suffix.layer.units, suffix.layer.index
    search = protocol.search

    def evaluate(gates: Tensor, owner: Tensor) -> Tensor:
        return faults.mend(suffix.resume(gates, owner, advance=meter.advance).cpu(), owner, layer)

    meter.expect(count, count * units * (units - 1) * search.expected(units))
    noise = faults.mend(suffix.noise().cpu(), torch.arange(count), layer)
    drop = torch.full((count, units), torch.nan, dtype=torch.float64)
    bend, slopes = drop.clone(), drop[:, :, None].repeat(1, 1, units)
    if len(sound := faults.sound()):
        alone, owners = (1 - torch.eye(units)).repeat(len(sound), 1), sound.repeat_interleave(units)
        if search.sloped:
            found, along = (value.cpu() for value in suffix.slopes(alone, owners, reduce=kl_and_bend))
            found, along = faults.mend(found, owners, layer), faults.mend(along, owners, layer)
            drop[sound], bend[sound] = found.view(-1, units, 2).unbind(-1)
            slopes[sound] = along.view(-1, units, units)
        else:
            drop[sound] = faults.mend(suffix.resume(alone, owners).cpu(), owners, layer).view(-1, units)

    sound = faults.sound()
    valid = torch.zeros(count, units, dtype=torch.bool)
    valid[sound] = drop[sound] > (NOISE_FACTOR * noise[sound, None]).clamp(min=protocol.threshold)
    _say_noise(noise[sound], layer, protocol.threshold)
    index = (valid[:, :, None] & ~torch.eye(units, dtype=torch.bool)).nonzero(as_tuple=True)
    owner, source, substitute = index
    pairs = Pairs(owner, source, substitute, drop[owner, source], units)
    if search.sloped:
        pairs = replace(pairs, slope=slopes[index], bend=bend[owner, substitute])
    meter.expect(count, len(pairs) * search.expected(units))
    best = search.best(pairs, evaluate) if len(pairs) else None
    meter.close(count)

    blank = torch.full((count, units, units), torch.nan, dtype=torch.float64)
    whole = {name: blank if best is None else blank.index_put(index, getattr(best, name)) for name in PAIRWISE}
    return {**whole, "drop": drop, "noise": noise}


def _say_noise(noise: Tensor, layer: int, threshold: float) -> None:
    if raised := int((NOISE_FACTOR * noise > threshold).sum()):
        log.warning(
            "At layer %d, the noise of %d of %d inputs raises their threshold above %g (at most to %g).",
            *(layer, raised, len(noise), threshold, NOISE_FACTOR * float(noise.max())),
        )


def reasons(faults: Faults, names: Sequence[str]) -> dict[str, str]:
    """What to say of each input with a fault."""
    return {
        names[index]: f"its outcome is not a number (resumed at layer {layer})"
        for index, layer in sorted(faults.layers.items())
    }
