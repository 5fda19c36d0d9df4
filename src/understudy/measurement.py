"""measure: the run, from a model and inputs to the substitutability of every pair."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import xarray as xr
from torch import Tensor, nn

from understudy import outcome as outcomes
from understudy.anatomy import Anatomy, anatomy
from understudy.capture import Capture, capture
from understudy.errors import UnderstudyError
from understudy.identity import Protocol
from understudy.inputs.batch import Inputs, as_inputs
from understudy.precision import Precision
from understudy.resume import BUDGET, Suffix, kl_and_bend
from understudy.search import Pairs, Search, as_search
from understudy.store import Run
from understudy.surgery import opened

log = logging.getLogger(__name__)

Layers = str | int | Sequence[int]  # "last", "all", "quarters", or numbers
Progress = Callable[[float, int], None]

# What a search finds of each pair.
PAIRWISE = ("substitutability", "compensation", "damage")

# Below this multiple of its noise a divergence says nothing.
NOISE_FACTOR = 100.0

# More inputs at once gain nothing: rows are what fills the batch. Not the length that texts often have.
_MOST_INPUTS = 96


def measure(
    model: nn.Module,
    inputs: Inputs | Mapping[str, Tensor],
    *,
    layers: Layers = "last",
    units: str = "heads",
    search: str | Search = "refine",
    outcome: str = "auto",
    threshold: float = 1e-5,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    batch_size: int | None = None,
    budget: int = BUDGET,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure which unit can stand in for which, on each input.

    >>> import understudy as us
    >>> run = us.measure(us.load("digits"), us.digits(8), layers="last", search="grid:16")
    >>> run.substitutability.dims
    ('input', 'layer', 'source', 'substitute')

    For every source i and substitute j of a layer, `S(i→j) = 1 − min_alpha D(i→j; alpha) / D_drop(i)`, where D is
    the KL divergence from the dense outcome, D_drop(i) has unit i removed, and D(i→j; alpha) also has unit j rescaled
    by alpha. Sources whose D_drop is not above the threshold are invalid, and NaN.

    model: a module from transformers or timm, as it is; it is unchanged afterwards.
    inputs: `understudy.images(...)`, `texts(...)`, ..., or a batch dict.
    layers: "last", "all", "quarters", a layer or a list of layers; they count from zero, negatives from the end.
    units: what is removed and rescaled: "heads".
    search: "refine", continuous, in few evaluations; "grid:N", N values of alpha over [0, 3], as in the paper;
        "estimate", in closed form, without running a pair; "estimate:K", with the K best of each source tried once;
        "screen:K", refine on the K best estimated substitutes; or a Search.
    outcome: "auto", "classes", "masked", "next" (every token that is no padding) or "last".
    threshold: the D_drop above which a source is valid, raised to 100 times the noise where that is more.
    device: where to measure; by default where the model is.
    dtype: the precision of everything after a site; by default the model's own, and float32 for a half-precision one.
    batch_size: how many inputs are captured at once; by default what the budget allows.
    budget: bytes of memory to use above the model's own.
    out: a Zarr store to write; the result is then opened from it lazily.
    progress: called with the matrices done (may be a fraction) and their number.
    """
    body = anatomy(model)
    chosen = as_inputs(inputs)
    if units != "heads":
        raise UnderstudyError(f"units={units!r} is not possible: the units that can be gated are 'heads'.")
    if batch_size is not None and batch_size < 1:
        raise UnderstudyError(f"batch_size must be at least 1, but {batch_size} was given.")
    if budget < 1:
        raise UnderstudyError(f"budget must be a number of bytes above 0, but {budget} was given.")
    if not threshold > 0:
        raise UnderstudyError(f"threshold must be above 0, but {threshold} was given.")
    protocol = Protocol(
        layers=resolve_layers(body, layers),
        units=units,
        search=as_search(search),
        outcome=outcomes.resolve(body, outcome),
        threshold=float(threshold),
    )
    with placed(body, device), opened(body.model):
        precision = Precision(body, dtype, min(protocol.layers))
        run = Run.begin(out, body, chosen, protocol, precision.dtype)
        if run.finished is not None:
            return run.finished
        began = time.perf_counter()
        meter = Meter(progress, len(chosen) * len(protocol.layers))
        with run:
            for indices, taken in _captures(body, chosen, protocol, batch_size, budget):
                names = [chosen.ids[index] for index in indices]
                reads = outcomes.reads(body, taken, protocol.outcome, names)
                found = []
                with precision.applied():
                    for layer in protocol.layers:
                        suffix = Suffix(body, taken, layer, reads, dtype=precision.dtype, budget=budget)
                        found.append(_matrices(suffix, protocol, names, meter))
                        run.evaluations += suffix.evaluations
                run.write(found)
            return run.finish(seconds=time.perf_counter() - began)


def _matrices(suffix: Suffix, protocol: Protocol, names: Sequence[str], meter: Meter) -> dict[str, Tensor]:
    """The variables of one layer for a batch of inputs: the drops first, then the pairs whose source is valid."""
    count, units = suffix.taken.count, suffix.layer.units

    def evaluate(gates: Tensor, owner: Tensor) -> Tensor:
        found = suffix.resume(gates, owner, advance=meter.advance).cpu()
        _refuse_nan(found, owner, names, suffix.layer.index)
        return found

    meter.expect(count, count * units * (units - 1) * protocol.search.expected(units))
    noise = suffix.noise().cpu()
    _refuse_nan(noise, torch.arange(count), names, suffix.layer.index)
    alone, owners = (1 - torch.eye(units)).repeat(count, 1), torch.arange(count).repeat_interleave(units)
    if protocol.search.sloped:
        found, along = (value.cpu() for value in suffix.slopes(alone, owners, reduce=kl_and_bend))
        (drop, bend), slopes = found.view(count, units, 2).unbind(-1), along.view(count, units, units)
        _refuse_nan(along.sum(-1) + found.sum(-1), owners, names, suffix.layer.index)
    else:
        drop, bend, slopes = suffix.resume(alone, owners).cpu().view(count, units), None, None
    _refuse_nan(drop.flatten(), owners, names, suffix.layer.index)

    valid = drop > (NOISE_FACTOR * noise[:, None]).clamp(min=protocol.threshold)
    if raised := int((NOISE_FACTOR * noise > protocol.threshold).sum()):
        log.warning(
            "At layer %d, the noise of %d of %d inputs raises their threshold above %g (at most to %g).",
            *(suffix.layer.index, raised, count, protocol.threshold, NOISE_FACTOR * float(noise.max())),
        )
    index = (valid[:, :, None] & ~torch.eye(units, dtype=torch.bool)).nonzero(as_tuple=True)
    owner, source, substitute = index
    pairs = Pairs(owner, source, substitute, drop[owner, source], units)
    if slopes is not None and bend is not None:
        pairs = replace(pairs, slope=slopes[index], bend=bend[owner, substitute])
    meter.expect(count, len(pairs) * protocol.search.expected(units))
    best = protocol.search.best(pairs, evaluate) if len(pairs) else None
    meter.close(count)

    blank = torch.full((count, units, units), torch.nan, dtype=torch.float64)
    whole = {name: blank if best is None else blank.index_put(index, getattr(best, name)) for name in PAIRWISE}
    return {**whole, "drop": drop, "noise": noise}


def _refuse_nan(found: Tensor, owner: Tensor, names: Sequence[str], layer: int) -> None:
    bad = ~found.isfinite()
    if bool(bad.any()):
        name = names[int(owner[bad][0])]
        raise UnderstudyError(
            f"The model's outcome is not a number on input {name!r} (resumed at layer {layer}): its weights or this "
            "input hold NaN or infinity, or its precision overflows."
        )


def _captures(
    body: Anatomy, inputs: Inputs, protocol: Protocol, batch_size: int | None, budget: int
) -> Iterator[tuple[list[int], Capture]]:
    """Batches of inputs on the dense forward. Without a batch size, the first input goes alone and tells it."""
    start, size, taken = 0, batch_size or 1, None
    while start < len(inputs):
        indices = list(range(start, min(start + size, len(inputs))))
        batch = inputs.batch(indices)
        if taken is not None and batch_size is None:
            # Texts differ in length: what fits is known only now.
            tokens = batch["input_ids"].shape[1] if body.reads_text else taken.tokens
            if (most := _inputs_at_once(body, taken, tokens, budget)) < len(indices):
                indices = indices[:most]
                batch = inputs.batch(indices)
        # As many inputs as tokens: a table over tokens could be taken for one over inputs. One text less may also
        # make the others shorter; how many tokens pictures have, only the capture tells.
        while body.reads_text and "input_ids" in batch and batch["input_ids"].shape[1] == len(indices) > 1:
            indices.pop()
            batch = inputs.batch(indices)
        taken = capture(body, batch, protocol.layers)
        if taken.count == taken.tokens > 1:
            indices.pop()
            taken = capture(body, inputs.batch(indices), protocol.layers)
        yield indices, taken
        start += len(indices)
        size = batch_size or _inputs_at_once(body, taken, taken.tokens, budget)


def _inputs_at_once(body: Anatomy, taken: Capture, tokens: int, budget: int) -> int:
    """How many inputs of this length are captured at once: what is kept, and what a block needs meanwhile."""
    states = [value for state in taken.sites.values() for value in (state.residual, state.inner, state.out)]
    kept = sum(value[0, 0].numel() for value in (*states, taken.final))
    meanwhile = 8 * taken.final.shape[-1] + 4 * max(max(p.shape) for p in body.layers[-1].block.parameters())
    bytes_each = 4 * tokens * max(kept, meanwhile)
    return max(1, min(_MOST_INPUTS, budget // 4 // bytes_each))


def resolve_layers(body: Anatomy, layers: Layers) -> tuple[int, ...]:
    """Layer indices in rising order, from what the user wrote."""
    count = len(body.layers)
    if isinstance(layers, str):
        named = {
            "last": [count - 1],
            "all": list(range(count)),
            "quarters": sorted({count // 4, count // 2, 3 * count // 4}),
        }
        if layers not in named:
            raise UnderstudyError(
                f"layers={layers!r} is not possible: say 'last', 'all', 'quarters', a layer or a list of layers."
            )
        return tuple(named[layers])
    chosen = [layers] if not isinstance(layers, Sequence) else [*layers]
    if not chosen:
        raise UnderstudyError("No layer was given: say 'last', 'all', 'quarters', a layer or a list of layers.")
    return tuple(sorted({body.layer_index(layer) for layer in chosen}))


@contextmanager
def placed(body: Anatomy, device: str | torch.device | None) -> Iterator[None]:
    """The model on a device, and back where it was afterwards."""
    try:
        wanted = body.device if device is None else torch.device(device)
    except RuntimeError as problem:
        raise UnderstudyError(
            f"device={device!r} is not one that torch knows: say 'cpu', 'cuda' or 'cuda:1'."
        ) from problem
    if wanted == body.device:
        yield
        return
    if getattr(body.model, "hf_device_map", None):
        raise UnderstudyError(
            f"device={str(device)!r} cannot be used with a model spread over devices by device_map: leave it out."
        )
    before = body.device
    try:
        try:
            body.model.to(wanted)
        except (RuntimeError, AssertionError) as problem:
            raise UnderstudyError(f"device={str(device)!r} cannot be used here: {problem}.") from problem
        yield
    finally:
        body.model.to(before)


class Meter:
    """Counts rows, and reports matrices (one input at one layer) done."""

    def __init__(self, report: Progress | None, total: int) -> None:
        self._report, self._total = report, total
        self._done, self._rows, self._expected, self._share = 0.0, 0, 1.0, 0

    def expect(self, matrices: int, rows: float) -> None:
        """The next `matrices` matrices take about this many rows in all."""
        self._expected, self._share = max(rows, 1.0), matrices

    def advance(self, rows: int) -> None:
        """Rows were run."""
        self._rows += rows
        self._tell(self._done + self._share * min(1.0, self._rows / self._expected))

    def close(self, matrices: int) -> None:
        """These matrices are done."""
        self._done, self._rows = self._done + matrices, 0
        self._tell(self._done)

    def _tell(self, done: float) -> None:
        if self._report is not None:
            self._report(done, self._total)
