"""A trial of routers: a model runs over inputs dense and routed, and what is lost and saved is held against it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor, nn

from understudy.anatomy import Anatomy, anatomy
from understudy.divergence import kl, probabilities
from understudy.errors import UnderstudyError
from understudy.head import output_logits
from understudy.inputs.batch import Batch, Inputs
from understudy.meter import Meter, Progress
from understudy.outcome import positions
from understudy.routing.online import routed
from understudy.routing.router import Router
from understudy.surgery import opened


@dataclass(frozen=True)
class Trial:
    """inputs: one row each. kl, fidelity: means over inputs. dense, routed: seconds of a batch, medians."""

    inputs: pd.DataFrame
    kl: float
    fidelity: float
    dense: float
    routed: float
    execution: str


def trial(
    model: nn.Module,
    inputs: Inputs,
    routers: Sequence[Router],
    *,
    keep: int,
    batch: int = 8,
    execution: str = "auto",
    progress: Progress | None = None,
) -> Trial:
    """Run all inputs through the dense and the routed model, batch by batch in turn.

    The outcome of each input is as in a measurement: its class, or the mean over its tokens.
    """
    body = anatomy(model)
    if not routers or batch < 1:
        raise UnderstudyError(f"Give at least one router and a batch of 1 or more, not {len(routers)} and {batch}.")
    outcome = routers[0].card.outcome
    meter = Meter(progress, len(inputs))
    seconds: dict[str, list[float]] = {"dense": [], "routed": []}
    rows = []
    with opened(body.model):
        for start in range(0, len(inputs), batch):
            index = range(start, min(start + batch, len(inputs)))
            given = inputs.batch(index)
            dense, took = _timed(body, given)
            seconds["dense"].append(took)
            with routed(model, routers, keep=keep, execution=execution) as chosen:
                logits, took = _timed(body, given)
            seconds["routed"].append(took)
            where = None if outcome == "classes" else positions(body, given, outcome)
            for place, name in enumerate(inputs.ids[at] for at in index):
                each = (
                    found[place][None] if where is None else found[place][where[place]] for found in (dense, logits)
                )
                before, after = each
                lost = kl(before, probabilities(before), after)
                same = (before.argmax(-1) == after.argmax(-1)).double()
                heads = {f"layer {layer}": _named(masks[0][place]) for layer, masks in chosen.masks.items()}
                rows.append({"input": name, **heads, "kl": float(lost.mean()), "same": float(same.mean())})
            meter.close(len(index))
    table = pd.DataFrame(rows).set_index("input")
    full = max(1, len(inputs) // batch)  # the last batch may be smaller
    medians = {name: float(np.median(times[:full])) for name, times in seconds.items()}
    return Trial(
        inputs=table,
        kl=float(table["kl"].mean()),
        fidelity=float(table["same"].mean()),
        dense=medians["dense"],
        routed=medians["routed"],
        execution=chosen.execution,
    )


def _timed(body: Anatomy, given: Batch) -> tuple[Tensor, float]:
    started = time.perf_counter()
    logits = output_logits(body, body.run(body.arguments(given))).cpu()  # waits for an accelerator
    return logits, time.perf_counter() - started


def _named(mask: Tensor) -> str:
    return " ".join(str(int(unit)) for unit in mask.nonzero()[:, 0])
