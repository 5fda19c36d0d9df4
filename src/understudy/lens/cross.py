"""Pairs across layers: a source at one layer, a substitute at a later one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from understudy.errors import UnderstudyError
from understudy.identity import attributes
from understudy.lens.passes import Given, collected, drops, opened
from understudy.meter import Progress
from understudy.resume import BUDGET, Suffix
from understudy.search import Pairs, Search, as_search


def across(
    model: nn.Module,
    inputs: Given,
    *,
    source: int,
    substitutes: int | Sequence[int],
    units: str = "heads",
    search: str | Search = "grid:31",
    outcome: str = "auto",
    threshold: float = 1e-5,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure which unit of a later layer can stand in for which of an earlier one.

    >>> import understudy as us
    >>> from understudy.lens.cross import across
    >>> run = across(us.load("digits"), us.digits(2), source=0, substitutes=[1, 3], search="grid:4")
    >>> run.substitutability.dims, run.substitutability.shape
    (('input', 'substitute_layer', 'source', 'substitute'), (2, 2, 6, 6))

    source: the layer whose units are removed. substitutes: the later layers whose units are rescaled, one at a time.
    The search must not start from slopes: a grid, or a search of one's own. Units are "heads" or "kv".
    """
    if not isinstance(source, int):
        raise UnderstudyError(f"The source is one layer, but {source!r} was given.")
    wanted = [substitutes] if isinstance(substitutes, int) else list(substitutes)
    way = as_search(search)
    if way.sloped:
        raise UnderstudyError(f"search={way.name!r} starts from slopes within a layer: across layers, give 'grid:N'.")
    if units.startswith("neurons"):
        raise UnderstudyError("Across layers, units are 'heads' or 'kv'.")
    with opened(
        model, inputs, layers=source, units=units, search=way, outcome=outcome, threshold=threshold, budget=budget
    ) as worker:
        first = worker.protocol.layers[0]
        later = [worker.body.layer_index(layer) for layer in wanted]
        if not later or min(later) <= first:
            raise UnderstudyError(f"Substitutes come after the source's layer {first}, but {wanted} were given.")
        found = collected(worker, lambda _, suffix: _across(suffix, later, way, threshold), progress)
        sizes = worker.body.sites[first].units, worker.body.sites[later[0]].units
        known = attributes(worker.body, worker.inputs, worker.protocol, worker.dtype)
        coords = {
            "input": list(worker.inputs.ids),
            "substitute_layer": later,
            "source": np.arange(sizes[0]),
            "substitute": np.arange(sizes[1]),
        }
    dims = ("input", "substitute_layer", "source", "substitute")
    variables = {
        name: (dims if name != "drop" else ("input", "source"), values[:, 0]) for name, values in found.items()
    }
    return xr.Dataset(variables, coords, {**known, "source_layer": first})


def _across(suffix: Suffix, later: Sequence[int], search: Search, threshold: float) -> dict[str, np.ndarray]:
    count, units = suffix.taken.count, suffix.layer.units
    drop, valid = drops(suffix, threshold)
    tables: dict[str, list[Tensor]] = {"substitutability": [], "compensation": [], "damage": []}
    for layer in later:
        others = suffix.body.sites[layer].units
        # The units of both layers side by side: sources first, substitutes behind them.
        owner, source, substitute = valid[:, :, None].expand(-1, -1, others).nonzero(as_tuple=True)
        pairs = Pairs(owner, source, substitute, drop[owner, source], units)
        both = replace(pairs, substitute=substitute + units, units=units + others)

        def evaluate(gates: Tensor, rows: Tensor, layer: int = layer) -> Tensor:
            return suffix.resume(gates[:, :units], rows, later={layer: gates[:, units:]}).cpu()

        best = search.best(both, evaluate) if len(pairs) else None
        for name, parts in tables.items():
            blank = torch.full((count, units, others), torch.nan, dtype=torch.float64)
            whole = blank if best is None else blank.index_put((owner, source, substitute), getattr(best, name))
            parts.append(whole)
    return {**{name: torch.stack(parts, 1).numpy() for name, parts in tables.items()}, "drop": drop.numpy()}
