"""The cost laws: seconds against heads, tokens, depth of the site, inputs and vocabulary, beside what the law says.

    python -m benchmarks.laws

One thing is changed at a time in a small GPT-2-shaped model. The two rates of the law are fitted to all of the runs;
`error` is what that leaves.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from benchmarks.timing import median_seconds
from transformers import GPT2Config, GPT2LMHeadModel

import understudy as us
from understudy.anatomy import anatomy
from understudy.costs import Rates, Shape, Work, cost, fitted
from understudy.search import as_search

BASE = {"heads": 4, "tokens": 64, "layer": 3, "inputs": 2, "vocabulary": 4096}
VARIED = {
    "heads": (2, 4, 8),
    "tokens": (32, 64, 128),
    "layer": (0, 3, 5),
    "inputs": (1, 2, 4),
    "vocabulary": (1024, 4096, 16384),
}
LAYERS, WIDTH, SEARCH = 6, 192, "grid:16"


@dataclass(frozen=True)
class Law:
    """One run: what was changed, its seconds, and the law's."""

    varied: str
    value: int
    evaluations: int
    seconds: float
    predicted: float
    error: float  # of the prediction, relative


def laws() -> tuple[Rates, list[Law]]:
    """The fitted rates, and every run beside its prediction."""
    runs = [(name, value, *_run({**BASE, name: value})) for name, value in _settings()]
    works, seconds = [run[3] for run in runs], [run[4] for run in runs]
    rates = fitted(works, seconds)
    table = []
    for name, value, evaluations, work, taken in runs:
        said = rates.seconds(work)
        table.append(Law(name, value, evaluations, taken, said, said / taken - 1))
    return rates, table


def _settings() -> Iterator[tuple[str, int]]:
    yield from ((name, value) for name, values in VARIED.items() for value in values)


def _run(setting: dict[str, int]) -> tuple[int, Work, float]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=setting["vocabulary"],
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=setting["heads"],
        n_positions=setting["tokens"],
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(config.vocab_size, (setting["inputs"], setting["tokens"]))
    options = {"layers": setting["layer"], "search": SEARCH, "threshold": 1e-300}
    run = us.measure(model, {"input_ids": ids}, **options)  # warmed up
    seconds = median_seconds(lambda: us.measure(model, {"input_ids": ids}, **options), 3)
    tokens = setting["tokens"]
    shape = Shape.of(anatomy(model), tokens=tokens, distributions=tokens, read=tokens, classes=setting["vocabulary"])
    law = cost(shape, inputs=setting["inputs"], layers=[setting["layer"]], search=as_search(SEARCH))
    assert law.evaluations == run.attrs["evaluations"]
    return int(law.evaluations), law.work, seconds


def main() -> None:
    """Print the rates and a row for each run, as lines of JSON."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.getLogger("understudy").setLevel(logging.ERROR)
    rates, table = laws()
    print(json.dumps({"fitted": asdict(rates), "measured": asdict(Rates.measured())}))
    for row in table:
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
