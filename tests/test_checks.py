"""check, without inputs, on every family: what `understudy check` runs."""

from __future__ import annotations

import pytest
import torch

import understudy as us
from families import CASES, LAYERS, build


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_family_passes(name, dtype):
    results = us.check(build(name, dtype))
    assert [result.layer for result in results] == list(range(LAYERS))
    assert all(result.passed for result in results), results
    expected = 1e-10 if dtype == torch.float64 else 1e-4
    assert {result.tolerance for result in results} == {expected}


def test_a_model_whose_logits_are_no_numbers():
    model = build("vit", torch.float32)
    model.classifier.bias.data.fill_(torch.nan)
    with pytest.raises(us.UnderstudyError, match="The logits of ViTForImageClassification are not numbers"):
        us.check(model)
