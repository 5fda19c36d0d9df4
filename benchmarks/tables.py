"""The results of a run as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TITLES = {
    "vit": "(a) last block of a ViT-B-sized model, 1,000 classes",
    "gpt2": "(b) middle layer of a GPT-2-small-sized model, 128 tokens",
    "llama": "(c) middle layer of a grouped-query model in the shape of SmolLM-135M, 128 tokens",
}


def markdown(found: Mapping[str, Any]) -> str:
    """One page, with a section for each part that was run."""
    sections = {"accuracy": _accuracy, "seconds": _seconds, "memory": _memory, "laws": _laws}
    parts = ["# Benchmark"]
    for name, section in sections.items():
        if name in found:
            parts += [section(found[name]), _machine(found[name])]
    return "\n\n".join(parts) + "\n"


def _accuracy(part: Mapping[str, Any]) -> str:
    head = (
        "model, layer",
        "evaluations a pair",
        "S ≥ grid:31 - 1e-4",
        "mean difference to grid:301",
        "Raw",
        "screen:3",
    )
    rows = [
        (
            f"{row['model']} {row['layer']}",
            f"{row['evaluations']:.2f}",
            f"{row['as_good']:.2%}",
            f"{row['fine']:.1e}",
            f"{row['raw']:.4f}",
            f"{row['screen']:+.4f}",
        )
        for row in _with_means(part["rows"])
    ]
    guesses = [
        (
            f"{row['model']} {row['layer']}",
            name,
            f"{guess['forwards']:.1f}",
            f"{guess['pearson']:.3f}",
            f"{guess['spearman']:.3f}",
            f"{guess['named']:.1%}",
            f"{guess['recovery']:.3f}",
        )
        for row in part["rows"]
        for name, guess in row["guesses"].items()
    ]
    second = ("model, layer", "search", "cost / H forwards", "Pearson", "Spearman", "best named", "recovery")
    return "\n\n".join(
        [
            "## Accuracy of the searches",
            "`refine` against grids, and the Raw Oracle that `screen:3` loses. The last row of a model is the mean of "
            "its layers.",
            _table(head, rows),
            "The estimates against `refine`: the correlation over all pairs, the rank correlation within a source, how "
            "often the best substitute is named, and what the one named recovers of what the best does. The cost is in "
            "time, over that of H forwards of the suffix.",
            _table(second, guesses),
        ]
    )


def _with_means(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    rows, out = [*rows], []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        keys = ("evaluations", "as_good", "fine", "raw", "screen")
        out += [
            *own,
            {"model": model, "layer": "all", **{key: sum(row[key] for row in own) / len(own) for key in keys}},
        ]
    return out


def _seconds(part: Mapping[str, Any]) -> str:
    blocks = [
        "## Seconds",
        "For one input: `grid:31` takes one drop for each source and 30 values of alpha for each pair; so do the "
        "peers, by full forwards or by their own resume. `timed` says how many interventions were timed; where they "
        "are fewer than the matrix has, they are scaled to it. Rows were timed in turn, and the medians are given. The "
        "answers of each peer were first held against ours on a few pairs with all their alphas.",
    ]
    for limit in part["limits"]:
        name = limit["case"]
        rows = [row for row in part["rows"] if row["case"] == name]
        ours = next(row["seconds_matrix"] for row in rows if row["tool"] == "understudy" and row["way"] == "grid:31")
        table = []
        for row in rows:
            seconds = row["seconds_matrix"]
            table.append(
                (
                    f"{row['tool']} {row['version']}".strip(),
                    row["way"],
                    "" if row["rows_at_once"] is None else str(row["rows_at_once"]),
                    "" if row["seconds_each"] is None else f"{row['seconds_each'] * 1e3:.3g}",
                    f"{row['sampled']:,}" if row["sampled"] else "",
                    "" if seconds is None else f"{seconds:,.3g}",
                    "" if seconds is None else f"{seconds / ours:,.3g}",
                    "" if row["difference_S"] is None or row["tool"] == "understudy" else f"{row['difference_S']:.0e}",
                    row["note"],
                )
            )
        head = ("tool", "way", "rows at once", "ms each", "timed", "s a matrix", "of grid:31", "difference in S", "")
        blocks += [f"### {TITLES[name]}", _table(head, table), _ratios(rows), _limits(limit)]
    return "\n\n".join(blocks)


def _ratios(rows: Iterable[Mapping[str, Any]]) -> str:
    """What a peer's 31-point grid takes, over each of our searches."""
    rows = [*rows]
    ours = {row["way"]: row["seconds_matrix"] for row in rows if row["tool"] == "understudy"}
    lines = []
    for way in ("full", "resume"):
        times = {r["tool"]: r["seconds_matrix"] for r in rows if r["way"] == way and r["seconds_matrix"] is not None}
        if times:
            best = min(times, key=times.__getitem__)
            ratios = ", ".join(f"{times[best] / seconds:,.3g} times `{name}`" for name, seconds in ours.items())
            lines.append(f"The fastest peer by `{way}` ({best}) takes {ratios}.")
    return " ".join(lines)


def _limits(limit: Mapping[str, Any]) -> str:
    text = (
        f"Matrix products run at {limit['matmul_rate'] / 1e9:.0f} GFLOP/s; one intervention is "
        f"{limit['flops_row'] / 1e9:.3g} GFLOP; `grid:31` works at {limit['share_of_rate']:.0%} of that rate. "
    )
    if limit["bare"] is not None:
        text += (
            f"A resumed row takes {limit['resumed'] * 1e3:.1f} ms without its divergence, "
            f"{limit['resumed'] / limit['bare']:.2f} of the bare remaining layers and head "
            f"({limit['bare'] * 1e3:.1f} ms); the divergence takes {limit['divergence'] * 1e3:.1f} ms, "
            f"{limit['divergence'] / limit['head']:.2f} of the head ({limit['head'] * 1e3:.1f} ms)."
        )
    return text


def _memory(part: Mapping[str, Any]) -> str:
    rows = [
        (
            row["search"],
            f"{row['vocabulary']:,}",
            str(row["inputs"]),
            str(row["tokens"]),
            f"{row['peak_over_budget']:.2f}",
        )
        for row in part["rows"]
    ]
    head = ("search", "vocabulary", "inputs", "tokens", "peak / budget")
    return "## Peak memory above the model's own, budget 1 GiB\n\n" + _table(head, rows)


def _laws(part: Mapping[str, Any]) -> str:
    rows = [
        (row["varied"], str(row["value"]), f"{row['evaluations']:,}", f"{row['seconds']:.2f}", f"{row['error']:+.0%}")
        for row in part["rows"]
    ]
    fitted, measured = part["fitted"], part["measured"]
    text = (
        "## Cost laws\n\nOne thing changed at a time. `seconds = FLOPs / rate + numbers touched / rate`, fitted to "
        f"all runs: {fitted['flops'] / 1e9:.0f} GFLOP/s and {fitted['touched'] / 1e9:.2f} G numbers/s (measured apart: "
        f"{measured['flops'] / 1e9:.0f} and {measured['touched'] / 1e9:.2f}).\n\n"
    )
    return text + _table(("varied", "value", "evaluations", "seconds", "the law's error"), rows)


def _machine(part: Mapping[str, Any]) -> str:
    named = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
    return f"*{named}; {part['minutes']:.0f} minutes.*"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = [*head]
    lines = [head, ["---"] * len(head), *([*row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
