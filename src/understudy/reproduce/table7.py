"""Table 7: a router that keeps the heads an input needs, against Taylor at the same budgets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import xarray as xr

from understudy.anatomy import anatomy
from understudy.inputs.batch import Inputs
from understudy.lens.joint import joint_table
from understudy.organize.bootstrap import interval, value
from understudy.organize.pooled import Array
from understudy.reproduce.study import Finding, Report, Setting, Study
from understudy.routing.evaluate import SEEDS, agreement, calibrations, judge, over_seeds
from understudy.routing.router import Router
from understudy.routing.splits import TEST, TRAINING, VALIDATION, Splits, digits_splits, split
from understudy.routing.teach import Teacher

# KL and accuracy; R1 and the intervals are from appendix F.
PAPER = {
    (3, "R2"): (0.1190, 0.8103),
    (6, "R2"): (0.0281, 0.8259),
    (9, "R2"): (0.0070, 0.8207),
    (3, "R1"): (0.1217, float("nan")),
    (6, "R1"): (0.0315, float("nan")),
    (9, "R1"): (0.00874, float("nan")),
    (3, "taylor"): (0.2105, 0.8058),
    (6, "taylor"): (0.0513, 0.8147),
    (9, "taylor"): (0.0138, 0.8103),
}
PAPER_INTERVALS = "-0.1137..-0.0717, -0.0325..-0.0157, -0.0110..-0.0035"
PAPER_ADVANTAGE = {"learned": {3: 0.0696, 6: 0.0178, 9: 0.0068}, "oracle": {3: 0.0604, 6: 0.0154, 9: 0.0049}}
PAPER_AGREEMENT = 0.9978


def run(setting: Setting) -> Report:
    """Teach R1 and R2 with three seeds at the last layer; judge them on inputs that neither they nor the model saw."""
    parts = _splits(setting)
    teacher = Teacher.of(
        setting.model,
        parts.training,
        parts.validation,
        folder=None if setting.folder is None else setting.folder / "routers",
        bar=setting.bar,
    )
    first = [teacher.pairs(seed=seed) for seed in SEEDS]
    second = [teacher.subsets(router) for router in first]
    judged = judge(setting.model, parts.test, [*first, *second], progress=setting.bar("test"))
    means = judged.over_seeds()
    calibrated = {name: over_seeds(found) for name, found in calibrations(setting.model, parts.test, judged).items()}
    twelve = anatomy(setting.model).layers[-1].units == 12
    same = {size: _agreement(setting, parts.test, second, size) for size in teacher.keep}
    table = joint_table(means)
    tables = {
        "routing": _routing(table, twelve),
        "minus_taylor": _gaps(table, means, twelve),
        "R2_minus_R1": _differences(joint_table(means, against="R1"), "R2"),
        "calibration": _calibration(calibrated, twelve),
    }
    about = {
        "inputs": f"{len(parts.training)} training, {len(parts.validation)} validation, {len(parts.test)} test; seeds "
        f"{', '.join(map(str, SEEDS))}, means over them for each input",
        "online masks equal offline masks": ", ".join(f"keep {size}: {share:.2%}" for size, share in same.items())
        + f" (the paper's: {PAPER_AGREEMENT:.2%})",
    }
    if twelve:
        about["the paper's intervals of R2 minus Taylor"] = PAPER_INTERVALS
    if "dense_correct" in judged.policies:
        about["dense accuracy"] = f"{float(judged.policies['dense_correct'].mean()):.4f} (the paper's: 0.8192)"
    data = {"policies": judged.policies, **{f"calibrated_{name}": found for name, found in calibrated.items()}}
    return Report(tables, _findings(table, tables, means, same), data, about)


def _splits(setting: Setting) -> Splits:
    if not setting.own and setting.scale == "mini":
        most = (TRAINING, VALIDATION, TEST)
        training, validation, test = most if setting.count is None else (min(setting.count, each) for each in most)
        return digits_splits(training, validation=validation, test=test)
    everything = setting.inputs(TRAINING + VALIDATION + TEST)
    enough = len(everything) >= 2 * (TEST + VALIDATION)
    return split(everything, test=TEST if enough else None, validation=VALIDATION if enough else None)


def _agreement(setting: Setting, inputs: Inputs, routers: list[Router], keep: int) -> float:
    return min(agreement(setting.model, inputs, router, keep=keep) for router in routers)


def _routing(table: pd.DataFrame, twelve: bool) -> pd.DataFrame:
    shown = table[["kl", "correct", "fidelity"]].copy()
    for at, name in enumerate(("kl", "correct")):
        paper = [PAPER[row][at] if twelve and row in PAPER else float("nan") for row in table.index]
        shown.insert(list(shown.columns).index(name) + 1, f"{name}_paper", paper)
    return shown


def _gaps(table: pd.DataFrame, means: xr.Dataset, twelve: bool) -> pd.DataFrame:
    """R2 against Taylor: the difference of mean KL with its interval, how much less that is, and the typical ratio.

    A few inputs have a KL that is orders of magnitude above the others' and make most of a mean. The typical ratio,
    the geometric mean over inputs of R2's KL over Taylor's, counts all alike.
    """
    shown = _differences(table, "R2")
    ratios = {int(size): _ratio(means["kl"].sel(keep=size)) for size in means["keep"].values}
    for at, end in enumerate(("", "_low", "_high")):
        shown[f"typical_ratio{end}"] = [ratios[int(size)][at] for size in shown.index]
    taylor = table.xs("taylor", level="policy")["kl"]
    shown["reduction"] = -shown["kl_difference"] / taylor
    if twelve:
        shown["reduction_paper"] = [
            1 - PAPER[size, "R2"][0] / PAPER[size, "taylor"][0] if (size, "R2") in PAPER else float("nan")
            for size in shown.index
        ]
    return shown


def _ratio(kl: xr.DataArray) -> tuple[float, float, float]:
    """The geometric mean of R2's KL over Taylor's, with its interval."""
    one, other = (np.log(kl.sel(policy=name).to_numpy().clip(min=1e-12)) for name in ("R2", "taylor"))
    gap = (one - other)[np.isfinite(one) & np.isfinite(other)]

    def statistic(draws: Array) -> Array:
        return np.asarray(np.exp(draws @ gap / draws.sum(-1)))

    low, high = interval(statistic, len(gap), confidence=0.95, resamples=2000, seed=0)
    return float(value(statistic, len(gap))), float(low), float(high)


def _differences(table: pd.DataFrame, policy: str) -> pd.DataFrame:
    one = pd.DataFrame(table.xs(policy, level="policy"))
    names = {f"kl_gap{end}": f"kl_difference{end}" for end in ("", "_low", "_high")}
    return one[list(names)].rename(columns=names)


def _calibration(found: Mapping[str, xr.Dataset], twelve: bool) -> pd.DataFrame:
    """Taylor's KL minus R2's under the same calibration: the advantage that subsets alone give."""
    rows = {}
    for name, each in found.items():
        gaps = joint_table(each, against="R2").xs("taylor", level="policy")
        means = joint_table(each)["kl"]
        for size in gaps.index:
            rows[name, int(size)] = {
                "R2_kl": means[size, "R2"],
                "taylor_kl": means[size, "taylor"],
                "advantage": gaps["kl_gap"][size],
                "advantage_low": gaps["kl_gap_low"][size],
                "advantage_high": gaps["kl_gap_high"][size],
                "advantage_paper": PAPER_ADVANTAGE[name].get(int(size), float("nan")) if twelve else float("nan"),
            }
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(list(rows), names=["calibration", "keep"])
    return table


def _findings(
    table: pd.DataFrame, tables: Mapping[str, pd.DataFrame], means: xr.Dataset, same: Mapping[int, float]
) -> tuple[Finding, ...]:
    sizes = [int(size) for size in means["keep"].values]
    kl = {name: table.xs(name, level="policy")["kl"] for name in ("R1", "R2", "taylor", "oracle")}
    gaps, step, fixed = tables["minus_taylor"], tables["R2_minus_R1"], tables["calibration"]

    def each(text: str, of: object) -> str:
        return ", ".join(f"keep {size}: {text.format(of[size])}" for size in sizes)  # type: ignore[index]

    return (
        Finding.of(
            "R2's KL is below Taylor's at every budget, with paired intervals below zero",
            each("{:+.1%}", -gaps["reduction"]),
            *((0.0, high) for high in gaps["kl_difference_high"]),
        ),
        Finding.of(
            "On a typical input, by the geometric mean of their ratio, R2's KL is below Taylor's at every budget",
            each("{:.2f}", gaps["typical_ratio"]),
            *((1.0, high) for high in gaps["typical_ratio_high"]),
        ),
        Finding.of(
            "R2's KL is below R1's at every budget",
            each("{:+.1e}", step["kl_difference"]),
            *((kl["R1"][size], kl["R2"][size]) for size in sizes),
        ),
        Finding.of(
            "Both lie above the joint oracle",
            each("{}", {s: f"{kl['R1'][s]:.2e}, {kl['R2'][s]:.2e}, {kl['oracle'][s]:.2e}" for s in sizes}),
            *((kl[name][size], kl["oracle"][size]) for name in ("R1", "R2") for size in sizes),
        ),
        *(
            Finding.of(
                f"The advantage over Taylor stays with {name} calibration, with intervals above zero",
                each("{:+.1e}", fixed["advantage"][name]),
                *((low, 0.0) for low in fixed["advantage_low"][name]),
            )
            for name in ("learned", "oracle")
        ),
        Finding.of(
            "Online and offline masks agree on at least 99.5% of inputs",
            each("{:.2%}", same),
            *((share, 0.995) for share in same.values()),
        ),
    )


STUDY = Study(
    "table7",
    "Routing by predicted CFS (section 6.2, Table 7, appendix F)",
    {"mini": "digits-12", "paper": "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"},
    {
        "mini": "the bundled digits-12 model; 4,096 moved training digits, 64 and 448 held-out ones, three seeds; "
        "about ten minutes",
        "paper": "a ViT-B/16 from the hub, 4,608 labelled ImageNet images in a folder (448 test, 64 validation, the "
        "rest for training, by a hash of their names), three seeds",
    },
    run,
)
