"""understudy route, as a user types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from understudy.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routers") / "router"
    result = run("route", "train", "digits-12", "--count", 32, "--epochs", 1, "--keep", "3,6", "--out", folder)
    assert result.exit_code == 0, result.output
    assert "R2 for layer 3 of digits-12" in result.output
    return folder


def test_train_writes_weights_and_a_card(router):
    card = json.loads((router / "router.json").read_text())
    assert (card["model"], card["layer"], card["units"], card["keep"]) == ("digits-12", 3, 12, [3, 6])
    assert card["how"]["training"]["inputs"] == 32
    assert card["how"]["choices"]
    assert (router / "router.safetensors").stat().st_size > 1e5


def test_evaluate_holds_it_against_other_policies(router):
    result = run("route", "evaluate", "digits-12", router, "--count", 6)
    assert result.exit_code == 0, result.output
    for word in ("oracle", "taylor", "magnitude", "random", "R2", "dense accuracy"):
        assert word in result.output
    alone = run("route", "evaluate", "digits-12", router, "--count", 6, "--no-oracle", "--keep", 4)
    assert alone.exit_code == 0, alone.output
    assert "oracle" not in alone.output


def test_run_says_what_is_kept_lost_and_taken(router):
    result = run("route", "run", "digits-12", router, "--keep", 3, "--count", 8, "--batch", 4)
    assert result.exit_code == 0, result.output
    assert "KL to the dense model" in result.output
    assert "compact" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits-12", "--keep", "3,x"), "give whole numbers such as 3,6,9"),
        (("train", "digits-12", "--keep", "13"), "keep=13 is not possible"),
        (("train", "digits-12", "--stage", "R3"), "say R1 or R2"),
        (("train", "digits-12", "--layer", "9"), "Layer 9 is not there"),
        (("evaluate", "digits", "ROUTER"), "This router is for 12 heads"),
        (("evaluate", "digits-12", "ROUTER", "--keep", "0"), "keep=0 is not possible"),
        (("run", "digits-12", "ROUTER", "--keep", "13"), "keep=13 is not possible"),
        (("run", "digits-12", "nowhere", "--keep", "3"), "holds no router"),
        (("run", "digits-12", "ROUTER", "--keep", "3", "--execution", "fast"), "execution='fast'"),
    ],
)
def test_wrong_use_is_one_sentence(router, tmp_path, arguments, message):
    arguments = [router if argument == "ROUTER" else argument for argument in arguments]
    more = ["--out", tmp_path / "out"] if arguments[0] == "train" else []
    result = run("route", *arguments, *more)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
