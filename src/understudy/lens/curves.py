"""D(i→j; alpha) on a whole grid: what policies with a fixed alpha need beside the least."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from torch import nn

from understudy.errors import UnderstudyError
from understudy.identity import attributes
from understudy.lens.passes import Given, collected, drops, opened
from understudy.meter import Progress
from understudy.resume import BUDGET, Suffix
from understudy.search import Grid, Pairs, as_search
from understudy.worker import Layers


def curves(
    model: nn.Module,
    inputs: Given,
    *,
    layers: Layers = "last",
    units: str = "heads",
    search: str = "grid:31",
    outcome: str = "auto",
    threshold: float = 1e-5,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure `divergence`, D at every alpha of a grid, for every pair: `[input, layer, source, substitute, alpha]`.

    >>> import understudy as us
    >>> from understudy.lens.curves import curves
    >>> found = curves(us.load("digits"), us.digits(2), search="grid:4")
    >>> found.divergence.sizes["alpha"], found.substitutability.dims
    (4, ('input', 'layer', 'source', 'substitute'))

    `substitutability` is what `measure` finds on the same grid; `drop` is D_drop. Invalid sources are NaN in all but
    `drop`. At alpha = 1 stands the drop itself.
    """
    grid = as_search(search)
    if not isinstance(grid, Grid):
        raise UnderstudyError(f"Curves are measured on a grid, such as 'grid:31', but {search!r} was given.")
    with opened(
        model, inputs, layers=layers, units=units, search=grid, outcome=outcome, threshold=threshold, budget=budget
    ) as worker:
        found = collected(worker, lambda _, suffix: _curves(suffix, grid, threshold), progress)
        unit = np.arange(worker.body.sites[worker.protocol.layers[0]].units)
        coords = {"input": list(worker.inputs.ids), "layer": list(worker.protocol.layers)}
        coords |= {"source": unit, "substitute": unit, "alpha": grid.alphas().numpy()}
        known = attributes(worker.body, worker.inputs, worker.protocol, worker.dtype)
    D, drop = found["divergence"], found["drop"]
    with np.errstate(invalid="ignore"):
        S = 1 - np.minimum(D.min(-1), drop[..., None]) / drop[..., None]
    dims = ("input", "layer", "source", "substitute")
    variables = {
        "divergence": ((*dims, "alpha"), D),
        "substitutability": (dims, S),
        "drop": (dims[:3], drop),
    }
    return xr.Dataset(variables, coords, known)


def _curves(suffix: Suffix, grid: Grid, threshold: float) -> dict[str, np.ndarray]:
    count, units, alphas = suffix.taken.count, suffix.layer.units, grid.alphas()
    drop, valid = drops(suffix, threshold)
    index = (valid[:, :, None] & ~torch.eye(units, dtype=torch.bool)).nonzero(as_tuple=True)
    owner, source, substitute = index
    pairs = Pairs(owner, source, substitute, drop[owner, source], units)
    table = torch.full((count, units, units, len(alphas)), torch.nan, dtype=torch.float64)
    if len(pairs):
        away = (alphas - 1).abs() > 1e-12  # at one it is the drop itself, exactly
        which = torch.arange(len(pairs)).repeat_interleave(int(away.sum()))
        found = pairs.run(which, alphas[away].repeat(len(pairs)), lambda g, o: suffix.resume(g, o).cpu())
        each = pairs.drop[:, None].repeat(1, len(alphas))
        each[:, away] = found.view(len(pairs), -1)
        table[index] = each
    return {"drop": drop.numpy(), "divergence": table.numpy()}
