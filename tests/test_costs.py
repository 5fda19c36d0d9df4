"""The law of costs against torch's own counter of floating-point operations, and against what searches run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import understudy as us
from families import CASES, HEADS, batch, build
from understudy.anatomy import anatomy
from understudy.capture import capture
from understudy.costs import Rates, Shape, Work, cost, fitted
from understudy.outcome import reads, resolve
from understudy.resume import Suffix
from understudy.search import as_search
from understudy.surgery import opened

ROWS = 6


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_work_of_a_row_is_what_torch_counts(name, layer):
    model, inputs = build(name, torch.float32), batch(name, dtype=torch.float32)
    model.set_attn_implementation("eager")  # torch does not count the fused attention of a CPU
    body = anatomy(model)
    with opened(model):
        taken = capture(body, inputs, [layer])
        read = reads(body, taken, resolve(body, "auto"), list("abcd"))
        suffix = Suffix(body, taken, layer, read, dtype=torch.float32)
        shape = Shape.of(
            body,
            tokens=taken.tokens,
            distributions=read.counts[0],
            read=read.counts[0] * read.tokens.shape[1],
            classes=suffix.classes,
        )
        suffix.resume(torch.rand(1, HEADS), torch.zeros(1).long())  # the dense logits are computed once
        with FlopCounterMode(display=False) as counter:
            # Without the divergence, which is counted in some of its shapes only.
            gates, owner = torch.rand(ROWS, HEADS), torch.zeros(ROWS).long()
            suffix.resume(gates, owner, reduce=lambda logits, *_: logits[..., 0].double())
    assert shape.row(layer).flops == pytest.approx(counter.get_total_flops() / ROWS, rel=0.02)


def test_the_law_counts_the_evaluations_of_a_grid():
    model, inputs = us.load("digits"), us.digits(5)
    run = us.measure(model, inputs, layers=[0, 3], search="grid:16")
    shape = Shape.of(anatomy(model), tokens=17, distributions=1, read=1, classes=10)
    law = cost(shape, inputs=5, layers=[0, 3], search=as_search("grid:16"))
    assert bool(run["substitutability"].notnull().sum() == 5 * 2 * 30), "all sources are valid"
    assert law.evaluations == run.attrs["evaluations"]
    assert law.stored == sum(run[name].nbytes for name in run.data_vars)


@pytest.mark.parametrize("search", ["refine", "screen:2", "estimate", "estimate:2"])
def test_the_law_is_near_what_a_search_runs(search):
    model, inputs = us.load("digits"), us.digits(16)
    run = us.measure(model, inputs, layers="all", search=search)
    shape = Shape.of(anatomy(model), tokens=17, distributions=1, read=1, classes=10)
    law = cost(shape, inputs=16, layers=range(4), search=as_search(search))
    assert law.evaluations == pytest.approx(run.attrs["evaluations"], rel=0.25)


def test_rates_are_found_from_times_and_measured():
    true = Rates(flops=1e11, touched=2e9)
    works = [Work(1e9, 1e6), Work(1e8, 1e7), Work(5e9, 3e7), Work(2e8, 9e6)]
    found = fitted(works, [true.seconds(work) for work in works])
    np.testing.assert_allclose([found.flops, found.touched], [1e11, 2e9], rtol=1e-6)
    here = Rates.measured()
    assert here.flops > 1e8
    assert here.touched > 1e6
