"""The commands, as a user runs them."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest
import torch
import xarray as xr
from typer.testing import CliRunner

from families import build
from understudy.cli import app

VERBS = ("demo", "check", "measure", "show", "reproduce", "train", "models")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_an_example(verb):
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert f"understudy {verb}" in result.output.partition("Examples")[2]


def test_help_does_not_import_torch():
    code = "import sys; from understudy.cli import app; print('torch' in sys.modules, 'xarray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == [
        "False",
        "False",
    ]


def test_demo_writes_what_it_names(tmp_path):
    result = run("demo", "--out", tmp_path / "demo", "--count", 8)
    assert result.exit_code == 0, result.output
    for name in ("digits.zarr", "summary.csv", "digits.svg"):
        assert name in result.output
        assert (tmp_path / "demo" / name).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}
    table = pd.read_csv(tmp_path / "demo" / "summary.csv", index_col="layer")
    assert f"{table.loc['all', 'raw']:.3f}" in result.output
    picture = (tmp_path / "demo" / "digits.svg").read_text()
    assert picture.startswith("<svg")
    assert "@font-face" not in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_measure_then_show(tmp_path):
    out = tmp_path / "run.zarr"
    result = run("measure", "digits", "--layers", "0,-1", "--count", 4, "--search", "grid:4", "--out", out)
    assert result.exit_code == 0, result.output
    assert str(out) in result.output.replace("\n", "")
    assert xr.open_zarr(out)["layer"].values.tolist() == [0, 3]
    shown = run("show", out, "--layer", 0, "--svg", tmp_path / "layer.svg")
    assert shown.exit_code == 0, shown.output
    assert "layer 0: mean S" in shown.output
    assert (tmp_path / "layer.svg").exists()
    wrong = run("show", out, "--layer", 2)
    assert wrong.exit_code == 2
    assert "Layer 2 is not in this run: it has 0, 3." in wrong.output
    same = run("measure", "digits", "--layers", "0,-1", "--count", 4, "--search", "grid:4", "--out", out)
    assert "already held this run" in same.output
    elsewhere = run("measure", "digits", "--count", 4, "--out", tmp_path)
    assert elsewhere.exit_code == 2
    assert "It was left as it is: choose another output" in elsewhere.output.replace("\n", " ")
    again = run("measure", "digits", "--layers", "0,-1", "--count", 4, "--search", "grid:5", "--out", out)
    assert again.exit_code == 2
    assert "search grid:4 there, grid:5 here" in again.output


def test_measure_stdlib_brings_its_inputs():
    result = run("measure", "stdlib", "--count", 2, "--search", "grid:3")
    assert result.exit_code == 0, result.output
    assert "outcome next" in result.output
    assert "nothing was written" in result.output


def test_check_passes_and_fails(monkeypatch):
    result = run("check", "digits", "--dtype", "float64")
    assert result.exit_code == 0, result.output
    assert "every layer is within 1e-10" in result.output

    from understudy.resume import Suffix

    right = Suffix.states
    monkeypatch.setattr(Suffix, "states", lambda *args, **kwargs: right(*args, **kwargs).roll(1, -1))
    broken = run("check", "digits")
    assert broken.exit_code == 1
    assert "beyond" in broken.output


def test_check_of_a_folder(tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path / "llama")
    result = run("check", tmp_path / "llama")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "digits", "--layers", "9"), "Layer 9 is not there"),
        (("measure", "nobody/nothing"), "could not be loaded"),
        (("measure", "digits", "--images", "a", "--texts", "b"), "Give one of --images, --texts and --masked-texts"),
        (("measure", "digits", "--images", "nowhere"), "nowhere is not a folder"),
        (("measure", "stdlib", "--images", "nowhere"), "stdlib reads text, not images"),
        (("measure", "digits", "--texts", "nowhere"), "digits reads images, not text"),
        (("measure", "digits", "--count", "0"), "0 held-out digits were asked for"),
        (("measure", "digits", "--head", "x"), "--head x is not possible"),
        (("show", "nowhere.zarr"), "There is no run at nowhere.zarr"),
        (("train", "letters"), "There is no recipe 'letters'"),
        (("demo", "--count", "9999", "--out", "nowhere"), "9999 held-out digits were asked for"),
    ],
)
def test_wrong_use_exits_with_two_and_one_sentence(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_model_of_your_own_needs_inputs(tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path / "llama")
    result = run("measure", tmp_path / "llama")
    assert result.exit_code == 2
    assert "brings no inputs of its own: give --images, --texts or --masked-texts" in result.output.replace("\n", " ")


def test_models_lists_what_there_is():
    result = run("models")
    assert result.exit_code == 0
    for word in ("digits-12", "stdlib", "gpt_neox", "timm"):
        assert word in result.output


def test_version_and_module():
    import understudy

    assert run("--version").output.strip() == f"understudy {understudy.__version__}"
    answer = subprocess.run([sys.executable, "-m", "understudy", "--version"], capture_output=True, text=True)
    assert answer.stdout.strip() == f"understudy {understudy.__version__}"
