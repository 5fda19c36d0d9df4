"""Recipes run from nothing to a folder that loads, and write nowhere else."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from understudy.errors import UnderstudyError
from understudy.recipes import RECIPES, train
from understudy.recipes.digits import DIGITS
from understudy.recipes.stdlib import STDLIB
from understudy.recipes.vit import moved

stdlib_module = importlib.import_module("understudy.inputs.stdlib")  # the package may export the function

TINY_DIGITS = dataclasses.replace(DIGITS, layers=1, heads=2, head_width=4, epochs=1, measured=8)
TINY_STDLIB = dataclasses.replace(STDLIB, vocabulary=300, layers=1, heads=2, width=16, context=16, steps=3, measured=4)


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    names = stdlib_module._files()[::25]
    monkeypatch.setattr(stdlib_module, "_files", lambda: names)


def test_the_digits_recipe_runs_end_to_end_and_writes_only_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = []
    out = train(TINY_DIGITS, "made/here", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(step, 19) for step in range(1, 20)]  # 1,198 digits, 64 a step
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    files = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "training.json"}
    assert {path.name for path in out.iterdir()} == files
    assert AutoModelForImageClassification.from_pretrained(out, use_safetensors=True).config.image_size == 8
    card = (out / "README.md").read_text()
    assert "valid sources, layer 0" in card
    assert "UCI" in card
    printed = capfd.readouterr()
    assert not printed.out


def test_a_seed_gives_the_same_weights_again_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        load_file(train(TINY_DIGITS, tmp_path / name, seed=seed, max_steps=3) / "model.safetensors")
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_the_card_states_what_was_changed_in_the_recipe(tmp_path: Path) -> None:
    out = train(TINY_DIGITS, tmp_path / "out", max_steps=3, learning_rate=0.125)
    card = (out / "README.md").read_text()
    assert "| learning_rate | 0.125 |" in card
    assert "| steps | 3 |" in card


def test_checkpoints_stay_inside_the_folder(tmp_path: Path) -> None:
    out = train(TINY_DIGITS, tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"checkpoint-1", "checkpoint-2"}


@pytest.mark.usefixtures("few_files")
def test_the_stdlib_recipe_runs_end_to_end(tmp_path: Path) -> None:
    out = train(TINY_STDLIB, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer) == 300
    assert tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"]) == "def f(x):\n    return x"
    card = (out / "README.md").read_text()
    assert "unigram" in card
    assert "PSF" in card


def test_moved_images_keep_their_range_and_still_ones_are_left_alone() -> None:
    pixels = torch.rand(16, 1, 8, 8) * 2 - 1
    assert torch.allclose(moved(pixels, 0.0, 0.0, 0.0), pixels, atol=1e-5)
    assert moved(pixels, 1.0, 15.0, 0.2).min() >= -1 - 1e-5
    paper = torch.full((4, 1, 8, 8), -1.0)
    assert torch.allclose(moved(paper, 1.0, 15.0, 0.2), paper)  # nothing but paper comes in at the edges


def test_an_unknown_recipe_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        UnderstudyError, match=r"^There is no recipe 'mnist'; the recipes are digits, digits-12, stdlib\.$"
    ):
        train("mnist", tmp_path)


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnderstudyError, match="is a file; give a folder for the model of recipe 'digits'"):
        train("digits", tmp_path / "file")


def test_a_folder_that_no_recipe_made_is_told(tmp_path: Path) -> None:
    from understudy.recipes.record import Record

    with pytest.raises(UnderstudyError, match=r"holds no training\.json: give a folder that a recipe has trained"):
        Record.load(tmp_path)


@pytest.mark.parametrize("name", list(RECIPES))
def test_training_without_accelerate_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(UnderstudyError, match=r'pip install "understudy\[train\]"$'):
        train(name, tmp_path)
