"""A probe measures a training without changing it, and its figures go where the Trainer's go."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import understudy as us
from understudy.errors import UnderstudyError
from understudy.metric import task_metric
from understudy.recipes.digits import DIGITS
from understudy.recipes.kept import kept, place
from understudy.scaling.checkpoints import checkpoints, measure_checkpoints
from understudy.scaling.probe import Probe, runs_in
from understudy.scaling.trajectory import trajectory

TINY = replace(DIGITS, layers=2, heads=3, head_width=4, epochs=2, by_index=True)  # 38 steps


class Reporter(TrainerCallback):
    """What TensorBoard's or W&B's callback is: it is told every log."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **_):  # noqa: ARG002
        self.logs.append((state.global_step, dict(logs)))


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """One training with a probe, its checkpoints kept, and what a reporter was told."""
    folder = tmp_path_factory.mktemp("probed")
    probe = Probe(us.digits(8), at=10, layers=[0, 1], scored=us.digits(64), out=folder / "probe")
    reporter = Reporter()
    out = kept(TINY, folder, seed=0, callbacks=[probe, reporter], checkpoints=True, save_steps=10)
    return SimpleNamespace(folder=folder, probe=probe, reporter=reporter, out=out)


def test_a_training_with_a_probe_ends_in_the_same_weights(probed, tmp_path):
    plain = kept(TINY, tmp_path, seed=0, save_strategy="no")
    a, b = weights(plain), weights(probed.out)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_its_figures_are_logged_through_the_trainer(probed):
    told = {step: logs for step, logs in probed.reporter.logs if "cfs_raw" in logs}
    assert list(told) == [10, 20, 30, 38]
    names = {"cfs_raw", "cfs_matched2", "cfs_cover", "cfs_rank", "cfs_drop", "cfs_valid", "cfs_accuracy"}
    assert names <= set(told[38])
    assert "cfs_similarity_to_previous" in told[20]
    last = probed.probe.runs[-1]
    assert told[38]["cfs_raw"] == pytest.approx(float(us.summary(last, resamples=0)["raw"].iloc[-1]))
    assert told[38]["cfs_accuracy"] == task_metric(us.load(probed.out), us.digits(64)).value


def test_the_last_run_is_that_of_the_saved_model(probed):
    run = us.measure(us.load(probed.out), us.digits(8), layers=[0, 1], search="estimate")
    found = probed.probe.runs[-1]
    assert np.allclose(run["substitutability"], found["substitutability"], atol=1e-5, equal_nan=True)
    assert probed.probe.trajectory()["step"].values.tolist() == [10, 20, 30, 38]


def test_runs_are_written_and_read_as_they_were(probed):
    read = list(runs_in(probed.folder / "probe").values())
    assert [run.attrs["step"] for run in read] == [10, 20, 30, 38]
    for one, other in zip(read, probed.probe.runs, strict=True):
        assert np.array_equal(one["substitutability"], other["substitutability"], equal_nan=True)
    assert trajectory(read).equals(probed.probe.trajectory())


def test_saved_checkpoints_give_the_same_trajectory(probed, tmp_path):
    saved = probed.out / "checkpoints"
    runs = measure_checkpoints(
        saved, us.digits(8), layers=[0, 1], search="estimate", scored=us.digits(64), out=tmp_path / "runs"
    )
    ours, theirs = trajectory(runs), probed.probe.trajectory()
    assert ours["step"].values.tolist() == theirs["step"].values.tolist()
    assert np.allclose(ours["epoch"], theirs["epoch"])
    assert np.array_equal(ours["metric"], theirs["metric"])
    assert np.allclose(ours["graph"], theirs["graph"], atol=1e-5, equal_nan=True)
    again = measure_checkpoints(saved, us.digits(8), layers=[0, 1], search="estimate", out=tmp_path / "runs")
    assert all(one.attrs["seconds"] == other.attrs["seconds"] for one, other in zip(runs, again, strict=True))


def test_a_training_that_goes_on_takes_up_what_belongs_to_its_checkpoint(probed, tmp_path):
    """Killed after step 25: the checkpoint is of step 20, and what was measured later belongs to no training."""
    name = place(TINY, 0)
    (tmp_path / name / "checkpoints").mkdir(parents=True)
    shutil.copytree(probed.out / "checkpoints" / "checkpoint-20", tmp_path / name / "checkpoints" / "checkpoint-20")
    shutil.copytree(probed.folder / "probe", tmp_path / "probe")
    probe = Probe(us.digits(8), at=10, layers=[0, 1], scored=us.digits(64), out=tmp_path / "probe")
    seen = []
    kept(TINY, tmp_path, seed=0, callbacks=[probe], progress=lambda done, _: seen.append(done))
    assert seen[0] == 21
    assert [run.attrs["step"] for run in probe.runs] == [10, 20, 30, 38]
    for one, other in zip(probe.runs, probed.probe.runs, strict=True):  # the training went as it had gone
        assert np.array_equal(one["substitutability"], other["substitutability"], equal_nan=True)
    assert len(list((tmp_path / "probe").iterdir())) == 4
    a, b = weights(tmp_path / name), weights(probed.out)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_run_that_was_lost_with_the_process_is_measured_again_at_its_checkpoint(tmp_path):
    """The Trainer saves before an epoch ends: a kill right after it leaves a checkpoint without its run."""
    name = place(TINY, 0)
    (tmp_path / name / "checkpoints").mkdir(parents=True)
    whole = Probe(us.digits(4), at=[0, 1, 2], unit="epochs", layers="last", out=tmp_path / "whole")
    out = kept(TINY, tmp_path / "all", seed=0, callbacks=[whole], checkpoints=True, save_steps=19)
    shutil.copytree(out / "checkpoints" / "checkpoint-19", tmp_path / name / "checkpoints" / "checkpoint-19")
    shutil.copytree(tmp_path / "whole", tmp_path / "probe")
    (tmp_path / "probe" / "step-0000019.nc").unlink()
    probe = Probe(us.digits(4), at=[0, 1, 2], unit="epochs", layers="last", out=tmp_path / "probe")
    again = kept(TINY, tmp_path, seed=0, callbacks=[probe])
    assert [run.attrs["step"] for run in probe.runs] == [0, 19, 38]
    assert probe.trajectory().equals(whole.trajectory())
    a, b = weights(again), weights(out)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_model_whose_heads_do_not_matter_yet_can_be_probed():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 50}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    probe = Probe({"input_ids": torch.randint(50, (3, 9))}, at=1)
    state = SimpleNamespace(global_step=1, epoch=0.5, max_steps=5, is_world_process_zero=True, log_history=[])
    probe.on_step_end(None, state, None, model=model)
    probe.on_step_end(None, SimpleNamespace(**{**vars(state), "global_step": 2}), None, model=model)
    assert state.log_history[0]["cfs_valid"] == 0
    assert "cfs_raw" not in state.log_history[0]
    assert probe.trajectory()["warmup"].all()


def test_the_last_step_is_measured_before_the_best_weights_take_its_place():
    args = SimpleNamespace(load_best_model_at_end=True, fsdp=None, deepspeed=None)
    state = SimpleNamespace(global_step=5, epoch=1.0, max_steps=5, is_world_process_zero=True, log_history=[])
    probe, model = Probe(us.digits(4), at=3), us.load("digits")
    probe.on_step_end(args, state, None, model=model)
    assert [run.attrs["step"] for run in probe.runs] == [5]
    early = Probe(us.digits(4), at=3)
    early.on_train_end(args, SimpleNamespace(**{**vars(state), "global_step": 4}), None, model=model)
    assert early.runs == []  # these weights are of another step


def test_a_probe_can_be_used_for_another_training(tmp_path):
    probe = Probe(us.digits(4), at=[2], unit="epochs", layers="last")
    found = []
    for seed in (0, 1):
        kept(TINY, tmp_path, seed=seed, callbacks=[probe], save_strategy="no")
        found.append(probe.runs[-1]["substitutability"].values)
    assert not np.array_equal(*found, equal_nan=True)


def test_epochs_and_the_untrained_model_can_be_asked_for(tmp_path):
    probe = Probe(us.digits(4), at=[0, 1], unit="epochs", layers="last")
    kept(TINY, tmp_path, seed=0, callbacks=[probe], save_strategy="no")
    assert [run.attrs["step"] for run in probe.runs] == [0, 19, 38]


def test_without_watch_the_history_is_told():
    probe = Probe(us.digits(4), at=1)
    state = SimpleNamespace(global_step=1, epoch=0.5, max_steps=9, is_world_process_zero=True, log_history=[])
    model = us.load("digits").train()
    probe.on_step_end(None, state, None, model=model)
    assert state.log_history[0]["step"] == 1
    assert 0 < state.log_history[0]["cfs_raw"] <= 1
    assert model.training


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"pixel_values": torch.zeros(2, 1, 9, 9)}, "The inputs do not fit ViTForImageClassification"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long)}, "takes pixel_values, but the batch has input_ids"),
    ],
)
def test_a_probe_set_of_another_shape_is_told_before_the_first_step(inputs, said, tmp_path):
    steps = []
    with pytest.raises(UnderstudyError, match=said):
        kept(TINY, tmp_path, seed=0, callbacks=[Probe(inputs, at=5)], progress=lambda *at: steps.append(at))
    assert not steps


@pytest.mark.parametrize(
    ("count", "settings", "said"),
    [
        (9, {}, "probe set"),
        (8, {"search": "grid:3"}, "search"),
        (8, {"layers": [1]}, "choice of layers"),
    ],
)
def test_another_look_in_the_same_folder_is_told(probed, tmp_path, count, settings, said):
    shutil.copytree(probed.folder / "probe", tmp_path / "probe")
    probe = Probe(us.digits(count), at=10, out=tmp_path / "probe", **{"layers": [0, 1], **settings})
    with pytest.raises(UnderstudyError, match=f"was measured on another {said}: give the same, or another folder"):
        kept(TINY, tmp_path, seed=0, callbacks=[probe])
    assert len(list((tmp_path / "probe").iterdir())) == 4


def test_wrong_uses_are_told():
    with pytest.raises(UnderstudyError, match="at=0 is not possible: give a number of steps above 0"):
        Probe(us.digits(2), at=0)
    with pytest.raises(UnderstudyError, match="unit='hours' is not possible: say 'steps' or 'epochs'"):
        Probe(us.digits(2), at=1, unit="hours")
    args = SimpleNamespace(fsdp=["full_shard"], deepspeed=None)
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    with pytest.raises(UnderstudyError, match="FSDP and DeepSpeed keep it in parts: save checkpoints"):
        Probe(us.digits(2), at=1).on_train_begin(args, state, None, model=us.load("digits"))


def test_folders_that_hold_no_trajectory_are_told(probed, tmp_path):
    with pytest.raises(UnderstudyError, match="is not a folder: give one that holds checkpoints"):
        checkpoints(tmp_path / "none")
    with pytest.raises(UnderstudyError, match="holds 0 checkpoints: a trajectory needs two or more"):
        checkpoints(tmp_path)
    for step in (10, 20):
        shutil.copytree(probed.out / "checkpoints" / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    config = json.loads((tmp_path / "checkpoint-20" / "config.json").read_text())
    (tmp_path / "checkpoint-20" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6}))
    with pytest.raises(UnderstudyError, match=r"checkpoint-20 has another architecture than checkpoint-10 \(num_att"):
        checkpoints(tmp_path)
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "again-10")
    with pytest.raises(UnderstudyError, match="are both of step 10"):
        checkpoints(tmp_path)
