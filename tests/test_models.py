"""Loading: bundled, local, offline, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

import understudy as us
from families import build

Error = us.UnderstudyError


@pytest.fixture
def saved(tmp_path):
    model = build("gpt2", torch.float32)
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny", model


def test_a_local_folder(saved):
    folder, model = saved
    loaded = us.load(folder)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(loaded.transformer.h[0].attn.c_proj.weight, model.transformer.h[0].attn.c_proj.weight)
    assert us.load(model) is model


def test_bundled_models_are_named_like_any_other():
    model = us.load("digits")
    run = us.measure(model, us.digits(2), search="grid:3")
    assert run.attrs["model"] == "digits"


def test_a_pickle_is_refused_unless_asked_for(saved):
    folder, model = saved
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(Error, match=r"only as a pickle \(pytorch_model.bin\), which can hold code.*allow_pickle=True"):
        us.load(folder)
    loaded = us.load(folder, allow_pickle=True)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


class Mischief:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_never_runs_code(saved, capsys):
    folder, model = saved
    (folder / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "extra": Mischief()}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.?only|could not be loaded"):
        us.load(folder, allow_pickle=True)
    assert "code ran" not in capsys.readouterr().out


def test_a_head_that_was_never_trained_is_refused(saved):
    folder, _ = saved
    with pytest.raises(
        Error, match=r"no weights for score.weight of GPT2ForSequenceClassification: they would be random"
    ):
        us.load(folder, head="classes")


def test_a_config_without_a_class_needs_a_head(saved):
    folder, model = saved
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Error, match=r"does not name a model class.*head='classes', 'masked' or 'next'"):
        us.load(folder)
    assert type(us.load(folder, head="next")) is type(model)
    with pytest.raises(Error, match=r"head='tokens' is not possible"):
        us.load(folder, head="tokens")


def test_a_hub_id_without_network():
    with pytest.raises(
        Error, match=r"'nobody/nothing' could not be loaded: it is no bundled model .* the hub could not be"
    ):
        us.load("nobody/nothing")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(Error, match=r"is a folder without config.json"):
        us.load(tmp_path)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_head_count_that_does_not_divide_in_a_config(name, tmp_path):
    build(name, torch.float32).save_pretrained(tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    config["num_attention_heads"] = 5
    config.pop("head_dim", None)
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Error, match=r"could not be loaded: .*5"):
        us.load(tmp_path / "odd")


def test_loading_is_quiet_and_leaves_the_loggers_as_they_were(saved, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    us.load(saved[0])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr().err == ""
