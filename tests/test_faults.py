"""Faults, done for real; `faults.py` says what each one is."""

from __future__ import annotations

import pytest

import faults

FEWER = {faults.damaged_shards: {"kinds": 2}}


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_lost(fault, tmp_path):
    try:
        assert fault(tmp_path, **FEWER.get(fault, {}))
    except faults.NotPossible as reason:
        pytest.skip(str(reason))
