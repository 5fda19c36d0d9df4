"""Controlled scaling: shapes as the paper's, trained once, and gone on with after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import understudy.reproduce.controlled as controlled_study
from understudy.errors import UnderstudyError
from understudy.inputs.corpus import corpus
from understudy.inputs.tokens import tokenized
from understudy.recipes.gpt2 import Budget, Gpt2Recipe, Shape
from understudy.recipes.kept import is_trained, kept, last_checkpoint, place
from understudy.reproduce import table4, table5
from understudy.reproduce.many import ManySetting
from understudy.scaling.controlled import MINI, PAPER, axis_of_depth, axis_of_heads, axis_of_width
from understudy.scaling.divide import divided

WORDS = ("which", "head", "can", "stand", "in", "for", "another", "of", "the", "same", "layer", "on", "this", "input")


def test_the_papers_shapes_have_the_papers_parameters():
    counts = {
        name: round(PAPER.parameters(shape) / 1e6, 2)
        for name, shape in {**PAPER.width, **PAPER.depth, **PAPER.heads}.items()
    }
    widths, depths = {"W576": 77.40, "W768": 124.44, "W1152": 250.36}, {"D9": 103.18, "D12": 124.44, "D18": 166.97}
    assert counts == widths | depths | dict.fromkeys(("6x128", "12x64", "24x32"), 124.44)
    assert PAPER.width["W768"] == PAPER.depth["D12"] == PAPER.heads["12x64"]


def test_the_mini_shapes_have_the_papers_heads_and_a_shared_baseline():
    assert [shape.heads for shape in MINI.width.values()] == [9, 12, 18]
    assert [shape.heads for shape in MINI.heads.values()] == [6, 12, 24]
    assert MINI.width["W96"] == MINI.depth["D4"] == MINI.heads["12x8"]


def test_shapes_that_cannot_be_are_told():
    with pytest.raises(UnderstudyError, match="A width of 100 is not a multiple of the head width 16: give 96 or 112"):
        axis_of_width(4, (96, 100), 16)
    with pytest.raises(UnderstudyError, match="A width of 96 cannot be cut into 7 heads"):
        axis_of_heads(4, 96, (6, 7))
    with pytest.raises(UnderstudyError, match="no shape in common"):
        replace(MINI, depth=axis_of_depth((3, 6), 96, 8))
    with pytest.raises(UnderstudyError, match="all models have the same parameters, but these have"):
        replace(MINI, heads={"a": Shape(4, 96, 6), "b": Shape(4, 72, 6)})
    with pytest.raises(UnderstudyError, match="less than one step of 16 contexts with 64 tokens"):
        replace(MINI.budget, tokens=1000)
    with pytest.raises(UnderstudyError, match="needs models that read them: these read 64"):
        replace(MINI, length=65)


@pytest.fixture
def text(tmp_path):
    """A corpus of a few documents."""
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "texts").mkdir()
    for number in range(20):
        chosen = torch.randint(len(WORDS), (400,), generator=generator)
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(WORDS[at] for at in chosen))
    return tmp_path / "texts"


def test_held_out_text_that_is_too_short_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(" ".join(WORDS) * (40 if number else 1))
    preset = replace(MINI, budget=replace(MINI.budget, tokens=2048, vocabulary=280), corpus=str(tmp_path))
    monkeypatch.setattr(controlled_study, "MINI", preset)
    with pytest.raises(UnderstudyError, match=r"held-out contexts of 64 tokens were asked for; the corpus .* gives"):
        table4.run(ManySetting("mini", tmp_path / "study"))
    assert not list((tmp_path / "study" / "models").glob("gpt2*"))


def test_devices_share_a_step_or_are_refused(monkeypatch):
    assert PAPER.budget.arguments(8)["gradient_accumulation_steps"] == 4
    with pytest.raises(UnderstudyError, match="A step of 32 batches cannot be shared by 3 devices"):
        PAPER.budget.arguments(3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnderstudyError, match="without torchrun"):
        divided({}, PAPER.corpus)


@pytest.fixture
def tiny(text, monkeypatch):
    """A preset that takes seconds."""
    preset = replace(
        MINI,
        budget=Budget(context=16, tokens=16 * 8 * 30, batch=8, learning_rate=5e-2, vocabulary=280),
        width=axis_of_width(2, (8, 16, 24), 4),
        depth=axis_of_depth((1, 2, 3), 16, 4),
        heads=axis_of_heads(2, 16, (2, 4, 8)),
        corpus=str(text),
        contexts=2,
        length=16,
        scored=8,
    )
    monkeypatch.setattr(controlled_study, "MINI", preset)
    return preset


def test_both_tables_share_what_they_have_in_common_and_train_it_once(tiny, tmp_path, monkeypatch):
    trained = []
    train = Gpt2Recipe.train

    def counted(self, out, **rest):
        trained.append(out.name)
        return train(self, out, **rest)

    monkeypatch.setattr(Gpt2Recipe, "train", counted)
    setting = ManySetting("mini", tmp_path / "study")
    first = table4.run(setting)
    assert len(trained) == len(set(trained)) == 5
    table = first.tables["scaling"]
    assert list(table.index) == [
        *(("width", name) for name in ("W8", "W16", "W24")),
        *(("depth", name) for name in ("D1", "D2", "D3")),
    ]
    pd.testing.assert_series_equal(table.loc[("width", "W16")], table.loc[("depth", "D2")], check_names=False)
    second = table5.run(setting)
    assert len(trained) == 5 + 2  # the baseline was there
    assert list(second.tables["capacity"]["parameters"]) == [tiny.parameters(tiny.heads["4x4"])] * 3
    heads = second.tables["capacity"]
    ranks = [count * rank for count, rank in zip((2, 4, 8), heads["rank"], strict=True)]
    assert heads["effective_rank"].to_list() == pytest.approx(ranks)
    again = table4.run(setting)
    pd.testing.assert_frame_equal(again.details["seeds"], first.details["seeds"])
    assert len(trained) == 7
    assert len(first.findings) == 5
    assert all(finding.holds is None for finding in first.findings)  # one seed has no spread


KILLED = """
import sys
from pathlib import Path
from understudy.inputs.tokens import Tokens
from understudy.recipes.gpt2 import Budget, Gpt2Recipe, Shape
from understudy.recipes.kept import kept
tokens, out = map(Path, sys.argv[1:])
budget = Budget(context=16, tokens=16 * 8 * 300, batch=8, learning_rate=3e-3, vocabulary=280)
recipe = Gpt2Recipe("tiny", Shape(1, 8, 2), budget, Tokens(tokens))
kept(recipe, out, seed=3, progress=lambda done, _: print(done, flush=True))
"""


def test_a_killed_training_goes_on_from_its_checkpoint_to_the_same_weights(text, tmp_path):
    tokens = tokenized(corpus(text), tmp_path / "tokens", vocabulary=280, tokens=60_000, held_out=100)
    budget = Budget(context=16, tokens=16 * 8 * 300, batch=8, learning_rate=3e-3, vocabulary=280)
    recipe = Gpt2Recipe("tiny", Shape(1, 8, 2), budget, tokens)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "tokens"), str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    out = tmp_path / "killed" / place(recipe, 3)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) > 100 and last_checkpoint(out / "checkpoints"):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert not is_trained(out)
    before = int(last_checkpoint(out / "checkpoints").rsplit("-", 1)[1])
    steps = []
    kept(recipe, tmp_path / "killed", seed=3, progress=lambda done, _: steps.append(done))
    assert steps[0] == before + 1
    whole = kept(recipe, tmp_path / "whole", seed=3)
    a, b = (load_file(folder / "model.safetensors") for folder in (out, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (out / "checkpoints").exists()


def test_a_checkpoint_that_was_not_finished_is_not_taken(tmp_path):
    for step, state in ((10, '{"global_step": 10}'), (20, '{"global_'), (30, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path / "none") is None


SHARED = """
import sys, time
from pathlib import Path
from understudy.scaling.divide import divided
folder = Path(sys.argv[1])
def piece(name):
    if not (folder / name).exists():
        time.sleep(0.3)
        with (folder / "log").open("a") as log:
            log.write(name + "\\n")
        (folder / name).touch()
    return name
print(divided({name: lambda name=name: piece(name) for name in "abcdef"}, folder))
"""


def test_processes_that_share_a_folder_divide_the_work(tmp_path):
    started = [
        subprocess.Popen([sys.executable, "-c", SHARED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60)[0] for process in started]
    assert answers[0] == answers[1] == f"{ {name: name for name in 'abcdef'} }\n"
    assert sorted((tmp_path / "log").read_text().split()) == list("abcdef")  # each once


def test_work_that_fails_is_free_for_others(tmp_path):
    with pytest.raises(RuntimeError, match="no"):
        divided({"a": lambda: (_ for _ in ()).throw(RuntimeError("no"))}, tmp_path)
    begun = time.monotonic()
    assert divided({"a": lambda: 1}, tmp_path) == {"a": 1}
    assert time.monotonic() - begun < 1
