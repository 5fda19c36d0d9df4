"""What a run will take, against what it took."""

from __future__ import annotations

import pytest
import torch

import understudy as us
from families import build
from understudy.cli.arguments import OpenModel
from understudy.models import skeleton


def test_the_plan_counts_what_is_run():
    for search in ("grid:4", "estimate"):
        said = us.plan(us.load("digits"), us.digits(6), layers="all", search=search, rate=1e11)
        run = us.measure(us.load("digits"), us.digits(6), layers="all", search=search, threshold=1e-12)
        assert said.evaluations == run.attrs["evaluations"]
    assert said.layers == (0, 1, 2, 3)
    assert said.disk == pytest.approx(sum(run[name].nbytes for name in run.data_vars), rel=0.05)


def test_texts_of_different_length_and_masks_are_counted_as_they_are():
    model = build("bert", torch.float32)
    ids = torch.randint(5, 60, (4, 12))
    positions = torch.zeros(4, 12, dtype=torch.bool)
    positions[:, 3] = True
    few = us.plan(model, {"input_ids": ids, "positions": positions}, rate=1e11)
    positions = torch.ones(4, 12, dtype=torch.bool)
    many = us.plan(model, {"input_ids": ids, "positions": positions}, rate=1e11)
    assert many.flops > 3 * few.flops
    assert many.evaluations == few.evaluations


@pytest.mark.parametrize("name", ["digits", "stdlib"])
def test_no_weights_are_needed(name):
    bare = skeleton(name)
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    inputs = us.digits(3) if name == "digits" else us.stdlib(3)
    assert us.plan(bare, inputs, layers="all", rate=1e11) == us.plan(us.load(name), inputs, layers="all", rate=1e11)
    assert isinstance(OpenModel(name).skeleton(), torch.nn.Module)


def test_a_rate_and_workers_divide_the_time():
    once = us.plan(us.load("digits"), us.digits(4), rate=1e10)
    assert us.plan(us.load("digits"), us.digits(4), rate=2e10).seconds == pytest.approx(once.seconds / 2)
    assert us.plan(us.load("digits"), us.digits(4), rate=1e10, workers=4).seconds == pytest.approx(once.seconds / 4)
    assert us.plan(us.load("digits"), us.digits(4)).seconds > 0
