"""Table 1: CFS against importance and similarity."""

from __future__ import annotations

import pandas as pd

from understudy.lens.curves import curves
from understudy.lens.policies import policies
from understudy.lens.proxies import proxies
from understudy.lens.signals import signals
from understudy.reproduce.study import Finding, Report, Setting, Study, beside, put_after

PAPER_S = {
    "drop": 0.0,
    "fixed_fixed": 0.0015,
    "l2_fixed": 0.0035,
    "conditional_fixed": 0.1213,
    "random_oracle": 0.1988,
    "l2_oracle": 0.2027,
    "fixed_oracle": 0.2186,
    "taylor_oracle": 0.2592,
    "conditional_oracle": 0.3701,
}
PAPER_KL = {
    "drop": 0.01151,
    "fixed_fixed": 0.01075,
    "l2_fixed": 0.01091,
    "conditional_fixed": 0.00950,
    "random_oracle": 0.00715,
    "l2_oracle": 0.00714,
    "fixed_oracle": 0.00663,
    "taylor_oracle": 0.00551,
    "conditional_oracle": 0.00375,
}
PAPER_SPEARMAN = {
    "taylor": 0.2386,
    "attention": 0.0175,
    "cosine": 0.0087,
    "proximity": 0.0003,
    "parameters": -0.0050,
    "norm": -0.0128,
}
SIMILARITIES = ("attention", "cosine", "proximity", "parameters")
# Below this a rank correlation is called none.
NONE = 0.1


def run(setting: Setting) -> Report:
    """Both halves of the table, all layers, the paper's 31-point grid."""
    inputs = setting.inputs(24 if setting.scale == "paper" else 48)
    tables = curves(setting.model, inputs, layers="all", search="grid:31", progress=setting.bar("curves"))
    seen = signals(setting.model, inputs, layers="all", progress=setting.bar("signals"))
    recovered = policies(tables, seen, calibration=0.5)
    evaluated = tables.sel(input=recovered.attrs["evaluation"])
    ranked = proxies(evaluated, seen)
    S = recovered["S"]
    put_after(recovered, "S", "S_paper", beside(S, PAPER_S))
    put_after(recovered, "kl", "kl_paper", beside(S, PAPER_KL))
    put_after(ranked, "spearman", "spearman_paper", beside(ranked["spearman"], PAPER_SPEARMAN))
    split = {name: recovered.attrs[name] for name in ("calibration", "evaluation")}
    data = {"curves": tables, "signals": seen}
    return Report({"policies": recovered, "proxies": ranked}, _findings(S, ranked["spearman"]), data, split)


def _findings(S: pd.Series, rank: pd.Series) -> tuple[Finding, ...]:
    others = S.drop("conditional_oracle").filter(like="_oracle")
    alike = rank[list(SIMILARITIES)]
    return (
        Finding.of(
            "Under the same oracle compensation, functional selection recovers more than every other representative",
            f"{S['conditional_oracle']:.4f} against {others.min():.4f} to {others.max():.4f}",
            *((S["conditional_oracle"], other) for other in others),
        ),
        Finding.of(
            "Choosing the substitute for each input recovers more than a fixed one, at fixed alphas",
            f"{S['conditional_fixed']:.4f} against {S['fixed_fixed']:.4f}",
            (S["conditional_fixed"], S["fixed_fixed"]),
        ),
        Finding.of(
            "Compensation for each input adds to a fixed representative",
            f"{S['fixed_oracle']:.4f} against {S['fixed_fixed']:.4f}",
            (S["fixed_oracle"], S["fixed_fixed"]),
        ),
        Finding.of(
            f"No similarity ranks the candidates as CFS does (rank correlation below {NONE:g})",
            ", ".join(f"{name} {rank[name]:+.3f}" for name in SIMILARITIES),
            *((NONE, abs(value)) for value in alike),
        ),
        Finding.of(
            "Importance ranks them better than every similarity",
            f"Taylor {rank['taylor']:+.3f}, at most {alike.max():+.3f}",
            *((rank["taylor"], value) for value in alike),
        ),
    )


STUDY = Study(
    "table1",
    "CFS against importance and similarity (section 4.1, Table 1)",
    {"mini": "digits", "paper": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"},
    {
        "mini": "the bundled digits model, 48 held-out digits (24 to fit what is fixed); about two minutes",
        "paper": "a ViT-S of 12 layers with 6 heads from the hub, 24 ImageNet images in a folder (12 to fit what is "
        "fixed)",
    },
    run,
)
