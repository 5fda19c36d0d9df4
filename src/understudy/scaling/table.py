"""The figures of a family in one table: the paper's Tables 3 to 5. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from understudy.organize.summary import summary
from understudy.scaling.family import Point

COLUMNS = ("raw", "matched2", "cover", "rank")


def figures(points: Sequence[Point], *, tau: float = 0.5, resamples: int = 2000) -> pd.DataFrame:
    """One row for each model and seed: parameters, task metric, and the organization over its layers.

    | column | |
    |---|---|
    | `parameters`, `heads` | how large it is; heads in a layer |
    | `metric` | accuracy, or loss in nats |
    | `raw`, `matched2`, `cover`, `rank` | Raw and Matched-2 Oracle, Cover/H at tau, Rank/H; means over layers |
    | `effective_rank` | the effective rank, not divided by the heads |
    | `*_low`, `*_high` | the interval over inputs |
    | `valid` | the share of valid source-input pairs |
    """
    rows = []
    for point in points:
        table = summary(point.run, taus=tau, resamples=resamples)
        whole = {str(name): float(table[name].iloc[-1]) for name in table}  # the last row is "all"
        heads = point.run.sizes["source"]
        row: dict[str, object] = {"model": point.name, "seed": point.seed, "parameters": point.parameters}
        row |= {"heads": heads, "metric": point.metric.value}
        for name in COLUMNS:
            column = f"cover{100 * tau:g}" if name == "cover" else name
            row |= {f"{name}{end}": whole[f"{column}{end}"] for end in ("", "_low", "_high")}
        row |= {f"effective_rank{end}": heads * whole[f"rank{end}"] for end in ("", "_low", "_high")}
        rows.append({**row, "valid": whole["valid"]})
    return pd.DataFrame(rows).set_index(["model", "seed"])


def mean_over_seeds(found: pd.DataFrame) -> pd.DataFrame:
    """The mean over seeds, one row a model in the order given.

    `*_low`, `*_high` are then the least and the largest over seeds; of a single seed they stay the interval over
    inputs. `seeds` tells which it is.
    """
    models = list(dict.fromkeys(found.index.get_level_values("model")))
    rows = []
    for model in models:
        each = found.loc[model]
        row: dict[str, object] = {"model": model, "seeds": len(each)}
        for name in found.columns:
            if str(name).endswith(("_low", "_high")):
                continue
            values = each[name]
            row[name] = int(values.iloc[0]) if name in ("parameters", "heads") else float(values.mean())
            if len(each) > 1 and name not in ("parameters", "heads", "valid"):
                row |= {f"{name}_low": float(values.min()), f"{name}_high": float(values.max())}
            elif f"{name}_low" in found.columns:
                row |= {f"{name}{end}": float(each[f"{name}{end}"].iloc[0]) for end in ("_low", "_high")}
        rows.append(row)
    return pd.DataFrame(rows).set_index("model")
