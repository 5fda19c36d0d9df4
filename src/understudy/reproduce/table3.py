"""Table 3: functional organization along families of growing models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pandas as pd
from torch import nn

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.inputs.images import images
from understudy.inputs.pictures import labelled_pictures
from understudy.organize.compare import compare
from understudy.recipes.digits import DIGITS
from understudy.reproduce.many import ManySetting, ManyStudy, spread_of
from understudy.reproduce.pictures import MINI
from understudy.reproduce.study import Finding, Report, put_after
from understudy.scaling.contrast import Contrast, within_seeds
from understudy.scaling.family import Point, SharedProtocol, points, trained_member
from understudy.scaling.natural import NATURAL, Natural
from understudy.scaling.table import figures, mean_over_seeds

# Task metric, Raw, Matched-2, Cover/H, Rank/H.
PAPER = {
    ("vit", "tiny"): (0.7695, 0.3379, 0.3379, 0.7982, 0.8998),
    ("vit", "small"): (0.8340, 0.4088, 0.2852, 0.7321, 0.8602),
    ("vit", "base"): (0.8535, 0.4976, 0.2889, 0.5972, 0.7276),
    ("vit", "large"): (0.8691, 0.6034, 0.3737, 0.3455, 0.4647),
    ("bert", "tiny"): (4.594, 0.0128, 0.0128, 1.0000, 0.9998),
    ("bert", "small"): (3.033, 0.1318, 0.0634, 0.9922, 0.9827),
    ("bert", "base"): (3.094, 0.1365, 0.0515, 0.9948, 0.9769),
    ("bert", "large"): (3.102, 0.1799, 0.0692, 0.9414, 0.9209),
    ("qwen2.5", "1.5B"): (2.702, 0.2725, 0.1620, 0.9549, 0.9052),
    ("qwen2.5", "3B"): (2.582, 0.3198, 0.1953, 0.8984, 0.8266),
    ("qwen2.5", "7B"): (2.457, 0.3712, 0.2180, 0.8240, 0.7427),
    ("qwen2.5", "14B"): (2.313, 0.4430, 0.2745, 0.6992, 0.6419),
}
COLUMNS = ("metric", "raw", "matched2", "cover", "rank")
# The sign that the paper sees along a family.
TRENDS = {"Raw Oracle rises": ("raw", 1), "Cover/H falls": ("cover", -1), "Rank/H falls": ("rank", -1)}
HEADS = (3, 6, 12)


def run(setting: ManySetting) -> Report:
    """The family of the digits or of the user's pictures at mini scale; the paper's, or one of them, at its scale."""
    if setting.scale == "mini":
        return _trained_family(setting)
    return _natural_families(setting)


def _trained_family(setting: ManySetting) -> Report:
    """ViTs of one head width and ever more heads, trained by one recipe; the paper's ViTs stand beside them."""
    data = DIGITS.data if setting.images is None else labelled_pictures(setting.images, side=MINI.side)
    recipes = MINI.family(data, HEADS)
    models = setting.folder / "models"
    asked = [(name, recipe, seed) for seed in range(setting.seeds) for name, recipe in recipes.items()]
    members = [trained_member(recipe, models, seed) for _, recipe, seed in asked]
    count = min(setting.count or MINI.measured, len(data.held_out))
    probe = data.held_out.take(range(count))
    protocol = SharedProtocol(lambda _model: probe, lambda _model: data.held_out, "last", "grid:31")
    found = points(members, protocol, setting.folder / "runs", engine=setting.engine, bar=setting.bar)
    seeds = figures(found, tau=protocol.tau)
    seeds.index = pd.MultiIndex.from_tuples([(name, seed) for name, _, seed in asked], names=["model", "seed"])
    table = mean_over_seeds(seeds)
    for at, name in enumerate(COLUMNS[1:], 1):
        paper = [PAPER["vit", size][at] for size in ("tiny", "small", "base")]
        put_after(table, name, f"{name}_paper", pd.Series(paper, index=table.index))
    names = list(recipes)
    steps = {
        claim: {
            f"{a} to {b}": within_seeds(seeds, partial(_difference, column=column, sign=sign, a=a, b=b))
            for a, b in [(names[0], names[-1]), *pairwise(names)]
        }
        for claim, (column, sign) in TRENDS.items()
    }
    about = {
        "protocol": f"{count} held-out pictures, last layer, grid:31, tau 0.5; accuracy on {len(data.held_out)}",
        "beside it": "the paper's ViT Tiny, Small and Base, which also have 3, 6 and 12 heads of one width",
        "spread": spread_of(setting.seeds),
    }
    return Report({data.name: table}, _findings(data.name, steps), {}, about, {"seeds": seeds})


def _difference(seed: pd.DataFrame, *, column: str, sign: int, a: str, b: str) -> float:
    return float(sign * (seed[column][b] - seed[column][a]))


def _natural_families(setting: ManySetting) -> Report:
    """The paper's families on the paper's data, or on the user's."""
    if setting.family is not None and setting.family not in NATURAL:
        raise UnderstudyError(f"There is no family {setting.family!r}: there are {', '.join(NATURAL)}.")
    chosen = [NATURAL[setting.family]] if setting.family is not None else list(NATURAL.values())
    if any(family.data is None for family in chosen) and (setting.images is None or setting.labels is None):
        raise UnderstudyError(
            "The ViT family is measured on 512 ImageNet-1K pictures: give a folder of them with --images, and their "
            "classes with --labels; or choose another family with --family."
        )
    tables, details = {}, {}
    findings: list[Finding] = []
    for family in chosen:
        found = points(
            family.members(),
            family.protocol(partial(_inputs, family, setting)),
            setting.folder / "runs",
            engine=setting.engine,
            bar=setting.bar,
        )
        sizes = list(family.models)
        seeds = figures(found)
        seeds.index = pd.MultiIndex.from_tuples([(size, 0) for size in sizes], names=["model", "seed"])
        table = mean_over_seeds(seeds)
        for at, name in enumerate(COLUMNS):
            paper = pd.Series([PAPER[family.name, size][at] for size in sizes], index=table.index)
            put_after(table, name, f"{name}_paper", paper)
        tables[family.name], details[f"{family.name}-seeds"] = table, seeds
        findings += _findings(family.name, _steps(sizes, found))
    about = {"protocol": "as in the paper's appendix B; intervals are over inputs, differences are paired"}
    return Report(tables, tuple(findings), {}, about, details)


def _inputs(family: Natural, setting: ManySetting, model: nn.Module) -> Inputs:
    if family.data is None:
        assert setting.images is not None
        return images(setting.images, model, count=max(family.measured, family.scored), labels=setting.labels)
    return family.read(model, setting.texts)


def _steps(sizes: Sequence[str], found: Sequence[Point]) -> dict[str, dict[str, Contrast]]:
    """The differences along a pretrained family: one model a size, so the spread is over inputs, paired."""
    every = dict(zip(sizes, found, strict=True))
    steps: dict[str, dict[str, Contrast]] = {claim: {} for claim in TRENDS}
    for a, b in [(sizes[0], sizes[-1]), *pairwise(sizes)]:
        # Layers are compared by their place: the last with the last, a quarter with a quarter.
        pair = [every[size].run.assign_coords(layer=range(every[size].run.sizes["layer"])) for size in (a, b)]
        row = compare(*pair).iloc[-1]
        for claim, (column, sign) in TRENDS.items():
            name = "cover50" if column == "cover" else column
            ends = sorted(sign * float(row[f"{name}_b_minus_a{end}"]) for end in ("_low", "_high"))
            steps[claim][f"{a} to {b}"] = Contrast(sign * float(row[f"{name}_b_minus_a"]), *ends)
    return steps


def _findings(name: str, steps: dict[str, dict[str, Contrast]]) -> tuple[Finding, ...]:
    found = []
    for claim, each in steps.items():
        (whole, total), *rest = each.items()
        found.append(Finding.beyond_spread(f"{name}: {claim} from the smallest to the largest", {whole: total}))
        found.append(Finding.beyond_spread(f"{name}: {claim} at every step", dict(rest)))
    return tuple(found)


STUDY = ManyStudy(
    "table3",
    "Functional organization across model scale (section 5.1, Table 3)",
    {"mini": ("seeds", "images", "count", "engine"), "paper": ("family", "images", "labels", "texts", "engine")},
    {
        "mini": "ViTs with 3, 6 and 12 heads, trained on the digits, or on a folder of labelled pictures of yours "
        "(--images); about five minutes a seed. It can be interrupted and goes on",
        "paper": "ViT AugReg Tiny to Large on 512 ImageNet pictures in a folder (--images, --labels), BERT Tiny to "
        "Large on MNLI, Qwen2.5 1.5B to 14B on FineWeb-Edu, from the hub; accelerators",
    },
    run,
)
