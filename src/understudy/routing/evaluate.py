"""Judging routers: KL, accuracy and fidelity beside Taylor, size, chance and the joint oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor, nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.lens.joint import gated_together, joint, joint_table
from understudy.lens.signals import signals
from understudy.lens.subsets import largest
from understudy.measurement import measure
from understudy.meter import Progress
from understudy.routing.calibrate import calibrated
from understudy.routing.lesson import summaries
from understudy.routing.router import Router

SEEDS = (17, 23, 41)


@dataclass(frozen=True)
class Judged:
    """policies: `kl`, `fidelity`, `correct` and `subset` of every policy, budget and input, each seed apart."""

    policies: xr.Dataset
    routers: tuple[Router, ...]
    z: Tensor  # summaries of the inputs

    def over_seeds(self) -> xr.Dataset:
        """The same, with the mean over its seeds for each input and policy."""
        return over_seeds(self.policies)

    def table(self, *, against: str = "taylor") -> pd.DataFrame:
        """Means, and paired differences to a policy with intervals over inputs."""
        return joint_table(self.over_seeds(), against=against)


def judge(
    model: nn.Module,
    inputs: Inputs,
    routers: Sequence[Router],
    *,
    keep: Sequence[int] | None = None,
    seeds: Sequence[int] = SEEDS,
    oracle: bool = True,
    progress: Progress | None = None,
) -> Judged:
    """Run what routers of one layer choose beside `taylor`, `magnitude`, `random` and the `oracle`.

    routers: of any stage and seed; a policy is named by both, as in "R2 17". keep: the budgets; by default those that
    the first router was taught. seeds: of the random subsets.
    """
    if not routers:
        raise UnderstudyError("Give at least one router.")
    first = routers[0].card
    for router in routers:
        body = router.check_model(model)
        if (router.card.layer, router.card.outcome) != (first.layer, first.outcome):
            raise UnderstudyError(
                f"Routers that are judged together are for one layer and outcome, but here are layer {first.layer} "
                f"({first.outcome}) and layer {router.card.layer} ({router.card.outcome})."
            )
    sizes = tuple(first.keep if keep is None else keep)
    for size in sizes:
        routers[0].check_budget(size)
    names = [f"{router.card.stage} {router.card.seed}" for router in routers]
    if len(set(names)) < len(names):
        raise UnderstudyError(f"Two routers have the same stage and seed: {', '.join(sorted(names))}.")
    z = summaries(model, inputs, layer=first.layer, outcome=first.outcome)
    masks = {
        name: {size: router.choose(z, size).numpy() for size in sizes}
        for name, router in zip(names, routers, strict=True)
    }
    units = body.layers[first.layer].units
    for seed in seeds:
        chance = np.random.default_rng(seed).random((len(inputs), units))
        masks[f"random {seed}"] = {size: largest(chance, size) for size in sizes}
    seen = signals(model, inputs, layers=first.layer, outcome=first.outcome)
    scores = {"taylor": seen["taylor"].to_numpy()[:, 0], "magnitude": seen["norm"].to_numpy()[:, 0]}
    found = joint(
        model,
        inputs,
        keep=list(sizes),
        layer=first.layer,
        outcome=first.outcome,
        policies=scores,
        masks=masks,
        oracle=oracle,
        progress=progress,
    )
    return Judged(found, tuple(routers), z)


def over_seeds(found: xr.Dataset) -> xr.Dataset:
    """Policies that differ in the seed at the end of their names become one: the mean over seeds, input by input."""
    kinds = [str(name).rpartition(" ")[0] or str(name) for name in found["policy"].values]
    numbers = found.drop_vars([name for name in ("subset", "dense_correct") if name in found])
    groups = {kind: [at for at, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}
    parts = [numbers.isel(policy=at).mean("policy").expand_dims(policy=[kind]) for kind, at in groups.items()]
    return xr.concat(parts, "policy").transpose("policy", ...).assign_attrs(found.attrs)


def calibrations(
    model: nn.Module, inputs: Inputs, judged: Judged, *, stage: str = "R2", progress: Progress | None = None
) -> Mapping[str, xr.Dataset]:
    """The subsets of a stage and of Taylor, with what stays made louder by the same calibration.

    "learned": who stands in and how much louder is what the router of a seed predicts, for its own subsets and for
    Taylor's. "oracle": both are measured. `kl` and `fidelity` have the dims policy, keep, input; policies bear their
    seeds.
    """
    routers = [router for router in judged.routers if router.card.stage == stage]
    if not routers:
        raise UnderstudyError(f"There is no router of stage {stage} to calibrate.")
    layer, outcome = routers[0].card.layer, routers[0].card.outcome
    run = measure(model, inputs, layers=layer, search="refine", outcome=outcome, progress=progress)
    truth = run["substitutability"].to_numpy()[:, 0], run["compensation"].to_numpy()[:, 0]
    subset = judged.policies["subset"]
    sizes = [int(size) for size in subset["keep"].values]
    found = {}
    for name in ("learned", "oracle"):
        gates, policies = [], []
        for router in routers:
            said = router.predict(judged.z)
            S, alpha = truth if name == "oracle" else (said.S.numpy(), said.alpha.numpy())
            for policy in (f"{stage} {router.card.seed}", "taylor"):
                chosen = subset.sel(policy=policy)
                gates += [calibrated(chosen.sel(keep=size).to_numpy(), S, alpha) for size in sizes]
                policies.append(f"{policy.split()[0]} {router.card.seed}")
        rows = gated_together(model, inputs, np.stack(gates, 1), layer=layer, outcome=outcome)
        coords = {"policy": policies, "keep": sizes, "input": list(inputs.ids)}
        shape = (len(policies), len(sizes), len(inputs))
        values = {each: rows[each].to_numpy().T.reshape(shape) for each in ("kl", "fidelity")}
        dims = ("policy", "keep", "input")
        variables = {variable: (dims, each) for variable, each in values.items()}
        found[name] = xr.Dataset(variables, coords, {**judged.policies.attrs, "calibration": name})
    return found


@torch.no_grad()
def agreement(model: nn.Module, inputs: Inputs, router: Router, *, keep: int, batch: int = 64) -> float:
    """The share of inputs whose masks, chosen while the model runs, equal those chosen beforehand."""
    from understudy.routing.online import routed

    body = router.check_model(model)
    with routed(model, router, keep=keep) as online:
        for start in range(0, len(inputs), batch):
            body.run(body.arguments(inputs.batch(range(start, min(start + batch, len(inputs))))))
    z = summaries(model, inputs, layer=router.card.layer, outcome=router.card.outcome)
    same = (online.of(router.card.layer) == router.choose(z, keep)).all(-1)
    return float(same.double().mean())
