"""measure: the run, from a model and inputs to the substitutability of every pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import xarray as xr
from torch import Tensor, nn

from understudy.engines import Engine, ShardsFailed, as_engine
from understudy.errors import Unfinished
from understudy.inputs.batch import Inputs
from understudy.meter import Meter, Progress
from understudy.resume import BUDGET
from understudy.run import Run
from understudy.search import Search
from understudy.store import named
from understudy.worker import Job, Layers

Given = Inputs | Mapping[str, Tensor]


def measure(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Given | Callable[[nn.Module], Given],
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
    shard: int | None = None,
    out: str | Path | None = None,
    engine: str | Engine = "local",
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

    model: a module from transformers or timm, as it is; it is unchanged afterwards. Or a function that opens it: each
        worker of a cluster then opens its own.
    inputs: `understudy.images(...)`, `texts(...)`, ..., or a batch dict; or a function that makes them for the model.
    layers: "last", "all", "quarters", a layer or a list of layers; they count from zero, negatives from the end.
    units: what is removed and rescaled: "heads"; "kv", groups of query heads that share keys and values; "neurons:N",
        the MLP's hidden neurons in N blocks.
    search: "refine", continuous, in few evaluations; "grid:N", N values of alpha over [0, 3], as in the paper;
        "estimate", in closed form, without running a pair; "estimate:K", with the K best of each source tried once;
        "screen:K", refine on the K best estimated substitutes; or a Search.
    outcome: "auto", "classes", "masked", "next" (every token that is no padding) or "last".
    threshold: the D_drop above which a source is valid, raised to 100 times the noise where that is more.
    device: where to measure; by default where the model is.
    dtype: the precision of everything after a site; by default the model's own, and float32 for a half-precision one.
    batch_size: how many inputs are captured at once; by default what the budget allows.
    budget: bytes of memory to use above the model's own; less where memory runs out.
    shard: how many inputs are written together; by default about ten seconds' work.
    out: a Zarr store to write, shard by shard; the result is then opened from it lazily. The same call again goes on
        where it was interrupted, and returns a finished run at once.
    engine: "local"; "ray", which spreads the shards over a cluster; or an Engine, such as `engines.ray.Ray(...)`.
    progress: called with the matrices done (may be a fraction) and their number.
    """
    job = Job(
        open=partial(_opened, model, inputs),
        layers=layers,
        units=units,
        search=search,
        outcome=outcome,
        threshold=threshold,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        budget=budget,
        shard=shard,
    )
    with as_engine(engine).open(job) as pool:
        run = Run(out, pool.about(), budget=budget)
        if (finished := run.finished) is not None:
            return finished
        with run:
            pending = run.pending
            layers_each = len(run.about.coords["layer"])
            left = sum(map(len, pending))
            meter = Meter(progress, len(run.ids) * layers_each, done=(len(run.ids) - left) * layers_each)
            try:
                for found in pool.shards(pending, meter, run.budget):
                    run.write(found)
            except ShardsFailed as problem:
                raise Unfinished(_failed(run, problem)) from problem
            return run.finish()


def _opened(
    model: nn.Module | Callable[[], nn.Module], inputs: Given | Callable[[nn.Module], Given]
) -> tuple[nn.Module, Given]:
    network = model if isinstance(model, nn.Module) or not callable(model) else model()
    return network, inputs(network) if callable(inputs) else inputs


def _failed(run: Run, problem: ShardsFailed) -> str:
    count = sum(map(len, problem.spans))
    kept = f"The others are kept in {run.path}; the same command tries these again." if run.path else ""
    return (
        f"{count} of {len(run.ids)} inputs could not be measured ({named(run.ids, problem.spans)}): "
        f"{problem.reason}. {kept}"
    ).strip()
