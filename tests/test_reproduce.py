"""The paper's studies as a user runs them, on few inputs."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import xarray as xr
from typer.testing import CliRunner

from understudy.cli import app
from understudy.reproduce import OF_ONE_MODEL, STUDIES


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.mark.parametrize("name", [study.name for study in OF_ONE_MODEL])
def test_a_study_prints_its_figures_beside_the_papers_and_saves_them(name, tmp_path):
    result = run("reproduce", name, "--count", 8, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "paper" in result.output
    assert "needs:" in result.output
    (folder,) = (tmp_path / name).iterdir()
    saved = json.loads((folder / "findings.json").read_text())
    assert (saved["study"], saved["scale"], saved["model"]) == (name, "mini", folder.name)
    assert len(saved["findings"]) >= 2
    assert all({"claim", "holds", "figures"} <= set(finding) for finding in saved["findings"])
    for path in folder.glob("*.csv"):
        assert len(pd.read_csv(path)) > 1
    stores = list(folder.glob("*.zarr"))
    assert stores
    assert all(xr.open_zarr(path).attrs["model"] == folder.name for path in stores)
    said = sum(result.output.count(word) for word in ("holds  ", "does not hold", "unresolved"))
    assert said >= len(saved["findings"])


def test_studies_are_listed_with_what_they_need():
    result = run("reproduce")
    assert result.exit_code == 0
    for name in STUDIES:
        assert name in result.output
    assert "ImageNet" in result.output


def test_wrong_uses():
    assert "There is no study 'table9': there are table1" in run("reproduce", "table9").output
    result = run("reproduce", "table1", "--scale", "huge")
    assert result.exit_code == 2
    assert "table1 has mini and paper" in result.output
    result = run("reproduce", "table1", "--scale", "paper")
    assert result.exit_code == 2
    assert "give --images" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--scale", "foo", "--model", "digits"), "table1 has mini and paper"),
        (("--count", "1"), "A study needs at least 2 inputs"),
        (("--labels", "nowhere.csv"), "--labels are for --images"),
    ],
)
def test_options_that_say_nothing_are_refused(options, said):
    result = run("reproduce", "table1", *options)
    assert result.exit_code == 2
    assert said in result.output


def test_a_study_runs_on_a_model_of_ones_own(tmp_path):
    (tmp_path / "texts.txt").write_text("import os\ndef main(args):\nfor name in names:\nreturn value + 1\n")
    result = run("reproduce", "direction", "--model", "stdlib", "--texts", tmp_path / "texts.txt", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "the study takes 32 inputs; here are 4" in result.output
