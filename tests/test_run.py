"""A run in its store: written, continued, refused, damaged and mended."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import xarray as xr

import understudy as us
from families import build

Error = us.UnderstudyError


def test_written_and_returned_are_the_same(vit, pictures, tmp_path):
    memory = us.measure(vit, pictures, layers="all", search="grid:4")
    disk = us.measure(vit, pictures, layers="all", search="grid:4", out=tmp_path / "runs" / "a.zarr")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a.zarr"]  # nothing half-written beside it
    assert disk["substitutability"].variable._in_memory is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = xr.open_zarr(tmp_path / "runs" / "a.zarr")
    for other in (disk, plain, us.open_run(tmp_path / "runs" / "a.zarr")):
        assert set(other.variables) == set(memory.variables)
        for name in set(memory.variables) - {"seconds"}:
            np.testing.assert_array_equal(other[name].values, memory[name].values)
        circumstance = {"seconds", "budget", "finished"}
        assert {k: v for k, v in other.attrs.items() if k not in circumstance} == {
            k: v for k, v in memory.attrs.items() if k not in circumstance
        }


def test_a_finished_run_returns_at_once_and_other_settings_are_refused(vit, pictures, tmp_path):
    path = tmp_path / "run.zarr"
    us.measure(vit, pictures, search="grid:4", out=path)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    calls = []
    us.measure(vit, pictures, search="grid:4", out=path, progress=lambda *a: calls.append(a))
    assert calls == []
    with pytest.raises(Error, match=r"other settings \(search grid:4 there, grid:5 here\).*left as it is"):
        us.measure(vit, pictures, search="grid:5", out=path)
    with pytest.raises(Error, match="other weights"):
        us.measure(build("vit", torch.float32, seed=9), pictures, search="grid:4", out=path)
    with pytest.raises(Error, match="other inputs"):
        us.measure(vit, {"pixel_values": pictures["pixel_values"] + 1}, search="grid:4", out=path)
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("keep me")
    with pytest.raises(Error, match="is not a run"):
        us.measure(vit, pictures, search="grid:4", out=other)
    assert (other / "mine.txt").read_text() == "keep me"
    assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_an_interrupted_run_goes_on_where_it_stopped(vit, pictures, tmp_path):
    whole = us.measure(vit, pictures, shard=2)
    seen = []

    def stop(done, total):
        seen.append(done)
        if done >= 2 and total == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        us.measure(vit, pictures, out=tmp_path / "run.zarr", shard=2, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        us.measure(vit, pictures, out=tmp_path / "run.zarr", shard=2, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["run.zarr"]
    first = []
    run = us.measure(vit, pictures, out=tmp_path / "run.zarr", progress=lambda done, _: first.append(done))
    np.testing.assert_array_equal(run["substitutability"].values, whole["substitutability"].values)
    assert first[0] >= 0
    assert first[-1] == 6


def test_what_is_no_run_is_never_touched(vit, pictures, tmp_path):
    other = tmp_path / "thesis"
    (other / "data").mkdir(parents=True)
    (other / ".lock").touch()
    (other / "data" / "a.csv").write_text("1")
    with pytest.raises(Error, match="is not a run"):
        us.measure(vit, pictures, search="grid:3", out=other)
    assert (other / "data" / "a.csv").read_text() == "1"
    run = tmp_path / "run.zarr"
    us.measure(vit, pictures, search="grid:3", out=run, shard=2)
    root = run / "zarr.json"
    root.write_bytes(root.read_bytes()[:600])
    before = sorted(path for path in run.rglob("*") if path.is_file())
    with pytest.raises(Error, match=r"is not a run of understudy, or is damaged\. It was left as it is"):
        us.measure(vit, pictures, search="grid:3", out=run, shard=2)
    assert before == sorted(path for path in run.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["input", "layer", "source"])
def test_coordinates_that_are_gone_are_written_again(vit, pictures, tmp_path, name):
    import shutil

    whole = us.measure(vit, pictures, layers=[0, 2], search="grid:3", out=tmp_path / "run.zarr")
    whole = whole.load()
    shutil.rmtree(tmp_path / "run.zarr" / name / "c")
    with pytest.raises(Error, match="its coordinates are not those"):
        us.open_run(tmp_path / "run.zarr")
    again = us.measure(vit, pictures, layers=[0, 2], search="grid:3", out=tmp_path / "run.zarr")
    xr.testing.assert_equal(again.load(), whole)


def test_a_store_that_vanishes_is_said_at_once(vit, pictures, tmp_path):
    import shutil

    from understudy.errors import Unfinished

    done = []

    def remove(count, _total):
        done.append(count)
        if 2 <= count < 4:
            shutil.rmtree(tmp_path / "run.zarr", ignore_errors=True)

    with pytest.raises(Unfinished, match="was removed or replaced while it was being written"):
        us.measure(vit, pictures, search="grid:3", out=tmp_path / "run.zarr", shard=2, progress=remove)
    assert max(done) <= 4


def test_an_input_that_vanishes_costs_only_its_shard(vit, pictures, tmp_path):
    from understudy.errors import Unfinished

    gone = [3]

    def load(indices):
        if set(gone) & set(indices):
            raise Error("3.png cannot be read as an image: it is gone.")
        return {"pixel_values": pictures["pixel_values"][list(indices)]}

    def inputs():
        return us.Inputs(tuple("abcdef"), load, {}, lambda index: bytes([index]))

    with pytest.raises(Unfinished, match=r"2 of 6 inputs could not be measured \(inputs c, d\): 3.png cannot be read"):
        us.measure(vit, inputs(), search="grid:3", out=tmp_path / "run.zarr", shard=2)
    assert us.open_run(tmp_path / "run.zarr").sizes["input"] == 4
    gone.clear()
    assert us.measure(vit, inputs(), search="grid:3", out=tmp_path / "run.zarr", shard=2).sizes["input"] == 6


def test_a_run_without_a_number_is_no_success_the_second_time(vit, pictures, tmp_path):
    nothing = {"pixel_values": pictures["pixel_values"] * torch.nan}
    for _ in range(2):
        with pytest.raises(Error, match="None of the 6 inputs could be measured"):
            us.measure(vit, nothing, search="grid:3", out=tmp_path / "run.zarr")


@pytest.mark.parametrize("how", [{"batch_size": 1}, {"batch_size": 4}, {"shard": 1}, {"shard": 5}, {"budget": 2**20}])
def test_results_do_not_depend_on_how_they_were_computed(vit, pictures, how):
    whole = us.measure(vit, pictures, layers="all")
    other = us.measure(vit, pictures, layers="all", **how)
    backwards = us.measure(vit, us.Inputs.of(pictures).take([5, 4, 3, 2, 1, 0]), layers="all", **how)
    for run in (other, backwards.isel(input=slice(None, None, -1))):
        np.testing.assert_allclose(run["substitutability"].values, whole["substitutability"].values, atol=1e-4)
        np.testing.assert_allclose(run["damage"].values, whole["damage"].values, rtol=1e-3, atol=1e-12)
        np.testing.assert_allclose(run["drop"].values, whole["drop"].values, rtol=1e-3)


def test_runs_concatenate_only_if_made_alike(vit, pictures):
    halves = [us.Inputs.of(pictures).take(part) for part in (range(3), range(3, 6))]
    a, b = (us.measure(vit, half, layers="all", search="grid:4") for half in halves)
    whole = us.measure(vit, pictures, layers="all", search="grid:4")
    joined = us.concat([a, b])
    np.testing.assert_allclose(joined["substitutability"].values, whole["substitutability"].values, atol=1e-4)
    assert joined.attrs["evaluations"] == whole.attrs["evaluations"]
    other = us.measure(vit, halves[1], layers="all", search="grid:5")
    with pytest.raises(Error, match="made differently and cannot be one: search grid:4 there, grid:5 here"):
        us.concat([a, other])
    with pytest.raises(Error, match="Input '0' is in more than one"):
        us.concat([a, a])
