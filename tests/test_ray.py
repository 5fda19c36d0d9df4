"""Shards over Ray actors; GPUs are Ray's logical ones, since the machine has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import understudy as us
from families import build
from understudy.engines.ray import Ray
from understudy.errors import Unfinished

ray = pytest.importorskip("ray")

COUNT = 12
OPTIONS = {"layers": [0, 3], "search": "grid:5", "shard": 2}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def truth():
    return us.measure(us.load("digits"), us.digits(COUNT), **OPTIONS)


def same(run, truth):
    np.testing.assert_allclose(run["substitutability"].values, truth["substitutability"].values, atol=1e-4)
    np.testing.assert_allclose(run["damage"].values, truth["damage"].values, rtol=1e-3, atol=1e-9)
    np.testing.assert_array_equal(run["evaluations"].values, truth["evaluations"].values)


def replicas():
    """The processes of our actors."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline() and process.cmdline()[0].startswith("ray::_Replica"):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_actors_share_the_shards_and_half_a_gpu_each(truth, tmp_path):
    seen = []
    run = us.measure(
        us.load("digits"),
        us.digits(COUNT),
        **OPTIONS,
        out=tmp_path / "run.zarr",
        engine=Ray(workers=2, gpus=0.5, cpus=1),
        progress=lambda done, total: seen.append((done, total)),
    )
    same(run, truth)
    assert seen[-1] == (2 * COUNT, 2 * COUNT)
    assert len(seen) == COUNT // 2
    assert ray.is_initialized()  # the cluster was there before, and stays


def test_a_killed_actor_is_replaced_and_its_shard_redone(truth, tmp_path):
    killed = []

    def kill_one():
        end = time.monotonic() + 60
        while not killed and time.monotonic() < end:
            if len(list((tmp_path / "run.zarr").glob("status/c/*"))) >= 1 and (there := replicas()):
                os.kill(there[0], signal.SIGKILL)
                killed.append(there[0])
            time.sleep(0.01)

    thread = threading.Thread(target=kill_one)
    thread.start()
    inputs = us.digits(COUNT)

    def slowly(indices):
        time.sleep(0.3)
        return inputs.batch(indices)

    slow = us.Inputs(inputs.ids, slowly, inputs.about, lambda index: inputs.ids[index].encode())
    run = us.measure(lambda: us.load("digits"), slow, **OPTIONS, out=tmp_path / "run.zarr", engine=Ray(workers=1))
    thread.join()
    assert killed
    same(run, truth)


def test_a_shard_that_keeps_failing_is_named_and_the_rest_completes(truth, tmp_path):
    inputs = us.digits(COUNT)

    def fatal(indices):
        if 5 in indices and len(indices) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs.batch(indices)

    def content(index):
        return inputs.ids[index].encode()

    fragile = us.Inputs(inputs.ids, fatal, inputs.about, content)
    with pytest.raises(Unfinished, match=f"2 of {COUNT} inputs could not be measured") as problem:
        us.measure(lambda: us.load("digits"), fragile, **OPTIONS, out=tmp_path / "run.zarr", engine=Ray(workers=2))
    assert inputs.ids[4] in str(problem.value)
    assert inputs.ids[5] in str(problem.value)
    assert "the same command tries these again" in str(problem.value)
    assert us.open_run(tmp_path / "run.zarr").sizes["input"] == COUNT - 2
    # Mended, the same command measures what is missing.
    mended = us.Inputs(inputs.ids, inputs.batch, inputs.about, content)
    same(us.measure(us.load("digits"), mended, **OPTIONS, out=tmp_path / "run.zarr"), truth)


def test_wrong_use_is_said_as_everywhere():
    with pytest.raises(us.UnderstudyError, match="Layer 9 is not there"):
        us.measure(us.load("digits"), us.digits(2), layers=9, engine="ray")
    with pytest.raises(us.UnderstudyError, match=r"with 1 CPUs and 5 GPUs: its largest node has 2 and 2"):
        us.measure(us.load("digits"), us.digits(2), engine=Ray(gpus=5))
    with pytest.raises(us.UnderstudyError, match="Engine 'slurm' is not known: possible are 'local' and 'ray'"):
        us.measure(us.load("digits"), us.digits(2), engine="slurm")
    with pytest.raises(us.UnderstudyError, match="workers must be at least 1"):
        Ray(workers=0)


def test_a_replica_may_be_spread_over_devices(tmp_path):
    """A model larger than its device: some blocks on the CPU, some on disk, in every actor."""
    build("llama", torch.float32).save_pretrained(tmp_path / "model")
    ids = {"input_ids": torch.randint(60, (4, 9), generator=torch.Generator().manual_seed(0))}
    truth = us.measure(us.load(tmp_path / "model"), ids, layers="all", search="grid:4")
    where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    count = len(us.load(tmp_path / "model").model.layers)
    where |= {f"model.layers.{index}": "disk" if index else "cpu" for index in range(count)}

    def spread():
        return us.load(tmp_path / "model", device_map=where, offload_folder=tmp_path / "offload")

    assert {p.device.type for p in spread().parameters()} == {"cpu", "meta"}  # meta: on disk until it is used
    for engine in ("local", Ray(workers=2, gpus=1)):
        run = us.measure(spread, ids, layers="all", search="grid:4", shard=1, engine=engine)
        np.testing.assert_allclose(run["substitutability"].values, truth["substitutability"].values, atol=1e-4)
        assert run.attrs["model_hash"] == truth.attrs["model_hash"]


def test_a_scheduler_that_ends_the_job_is_obeyed(tmp_path):
    """SIGTERM to the driver: Ray's own answer to it would be to abort."""
    out = tmp_path / "run.zarr"
    command = [sys.executable, "-m", "understudy", "measure", "digits", "--count", "599", "--layers", "all"]
    command += ["--search", "grid:31", "--shard", "4", "--engine", "ray", "--workers", "1", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 90
    while len(list(out.glob("status/c/*"))) < 1 and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = " ".join(process.communicate(timeout=60)[1].split())
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    assert 0 < us.open_run(out).sizes["input"] < 599
