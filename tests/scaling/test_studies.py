"""The studies over many models as a user runs them, on models that take seconds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import understudy as us
import understudy.reproduce.figure2 as figure2
import understudy.reproduce.pictures as pictures
import understudy.reproduce.table3 as table3
from families import build
from understudy.cli import app
from understudy.errors import UnderstudyError
from understudy.metric import task_metric
from understudy.recipes.digits import DIGITS
from understudy.report.export import can_export
from understudy.reproduce import OF_MANY
from understudy.reproduce.many import ManySetting
from understudy.reproduce.study import Finding
from understudy.scaling.contrast import Contrast, over_seeds, within_seeds
from understudy.scaling.natural import NATURAL, Natural
from understudy.scaling.table import figures, mean_over_seeds

WORDS = ("a", "b", "c", "d", "e", "f", "g", "h")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture
def small(monkeypatch):
    """The mini studies of pictures, in seconds."""
    digits = replace(DIGITS, layers=4, heads=3, head_width=4, epochs=4)
    mini = replace(pictures.MINI, epochs=1, measured=8)
    for module in (pictures, figure2, table3):
        monkeypatch.setattr(module, "DIGITS", digits)
        monkeypatch.setattr(module, "MINI", mini)


@pytest.mark.usefixtures("small")
def test_a_family_is_trained_measured_and_put_beside_the_papers(tmp_path):
    result = run("reproduce", "table3", "--out", tmp_path, "--seeds", 2, "--count", 6)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "table3" / "mini"
    table = pd.read_csv(folder / "digits.csv", index_col=0)
    assert list(table.index) == ["digits-3x8", "digits-6x8", "digits-12x8"]
    assert list(table["heads"]) == [3, 6, 12]
    assert table["parameters"].is_monotonic_increasing
    seeds = pd.read_csv(folder / "seeds.csv", index_col=[0, 1])
    assert len(seeds) == 6
    for name in ("metric", "raw", "rank"):
        each = seeds.loc["digits-6x8", name]
        row = table.loc["digits-6x8"]
        assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx(
            (each.mean(), each.min(), each.max())
        )
    assert row["raw_paper"] == 0.4088
    saved = json.loads((folder / "findings.json").read_text())
    assert len(saved["findings"]) == 6
    assert "(0.3379)" in result.output
    accuracy = task_metric(us.load(next((tmp_path / "models").glob("digits-3x8*seed1"))), us.digits()).value
    assert seeds.loc[("digits-3x8", 1), "metric"] == accuracy


@pytest.mark.usefixtures("small")
def test_a_training_is_followed_and_drawn(tmp_path):
    result = run("reproduce", "figure2", "--out", tmp_path, "--count", 6)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "figure2" / "mini"
    found = xr.open_zarr(folder / "trajectory-seed0.zarr")
    assert found["epoch"].values.tolist() == [0, 1, 2, 3, 4]
    assert found["layer"].values.tolist() == [1, 2, 3]
    suffixes = ("svg", "pdf") if can_export() else ("html",)
    for name in ("formation", "trajectory", "depth", "graphs"):
        assert all((folder / f"{name}.{suffix}").stat().st_size > 1000 for suffix in suffixes)
    assert len(pd.read_csv(folder / "formation.csv")) == 4 * 3
    again = run("reproduce", "figure2", "--out", tmp_path, "--count", 6)  # nothing is trained again
    assert again.exit_code == 0
    assert again.output.replace("\n", " ") == result.output.replace("\n", " ")
    assert len(list((tmp_path / "models").iterdir())) == 1


def _trajectory(similar, metric=None):
    """A trajectory of one layer or several with this similarity `[half, step, layer]`."""
    similar = np.asarray(similar, dtype=float)
    steps = similar.shape[1]
    found = xr.Dataset({"similarity_halves": (("half", "step", "layer"), similar)}, {"step": range(steps)})
    found["similarity"] = found["similarity_halves"].mean("half")
    found["warmup"] = xr.zeros_like(found["similarity"], dtype=bool)
    if metric is not None:
        found["metric"] = ("step", np.asarray(metric, dtype=float))
    return found


def test_a_fall_counts_only_where_both_halves_of_the_inputs_show_it():
    fall = np.array([0.0, 0.2, 0.8, 0.3, 0.9, 1.0])
    assert figure2.largest_fall(_trajectory(np.stack([fall, fall])[:, :, None])) == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    noise = [figure2.largest_fall(_trajectory(0.7 + 0.08 * rng.standard_normal((2, 24, 3)))) for _ in range(400)]
    assert abs(np.mean(noise)) < 0.03  # chance alone falls nowhere, on average
    alike = [figure2.range_of_layers(_trajectory(0.7 + 0.08 * rng.standard_normal((2, 24, 3)))) for _ in range(400)]
    assert abs(np.mean(alike)) < 0.03


def test_claims_about_performance_need_performance_that_rises():
    similar = np.stack([np.linspace(0, 1, 11)] * 2)[:, :, None]
    assert np.isnan(figure2.unlike_when_good(_trajectory(similar, np.full(11, 0.5))))
    metric = [0.1, 0.97, 0.2, 0.5, 0.96, 0.96, 0.97, 0.98, 0.97, 0.97, 0.98]  # once by chance, then for good at 4
    assert figure2.unlike_when_good(_trajectory(similar, metric)) == pytest.approx(0.9 - 0.4)


def test_warm_up_is_no_formation():
    found = _trajectory(np.stack([np.linspace(0, 1, 21)] * 2)[:, :, None])
    assert figure2.early_and_late(found, 0) > 0.4
    found["warmup"][:5] = True
    assert np.isnan(figure2.early_and_late(found, 0))


def _bert(folder, layers, heads):
    vocabulary = {name: at for at, name in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", mask_token="[MASK]", pad_token="[PAD]"
    )
    torch.manual_seed(layers)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 8 * heads}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=16, max_position_embeddings=32, **sizes)
    config.initializer_range = 0.5
    BertForMaskedLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def masked(tmp_path, monkeypatch):
    """A family of two masked-language models in folders, with texts."""
    sizes = {"tiny": _bert(tmp_path / "tiny", 1, 2), "small": _bert(tmp_path / "small", 2, 4)}
    family = Natural("bert", sizes, head="masked", measured=4, scored=6, layers="last", search="grid:3")
    family = replace(family, data="hub:nowhere/nothing")
    monkeypatch.setitem(NATURAL, "bert", family)
    rng = np.random.default_rng(0)
    (tmp_path / "texts.txt").write_text("\n".join(" ".join(rng.choice(WORDS, 12)) for _ in range(6)))
    return tmp_path / "texts.txt"


def test_a_pretrained_family_is_compared_on_the_same_texts(masked, tmp_path):
    out = tmp_path / "out"
    result = run("reproduce", "table3", "--scale", "paper", "--family", "bert", "--texts", masked, "--out", out)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(out / "table3" / "paper" / "bert.csv", index_col=0)
    assert list(table.index) == ["tiny", "small"]
    assert list(table["metric_paper"]) == [4.594, 3.033]
    runs = [us.open_run(out / "runs" / f"bert-{size}.zarr") for size in ("tiny", "small")]
    assert [run.sizes["input"] for run in runs] == [4, 4]
    assert list(runs[0]["input"].values) == list(runs[1]["input"].values)
    # The loss is over the masked tokens: eight of each of the six texts.
    model = us.load(tmp_path / "small")
    inputs = us.masked_texts(masked, model, masks=8)
    batch = inputs.batch(range(6))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    chosen = batch["positions"]
    expected = -logits.log_softmax(-1)[chosen].gather(1, batch["labels"][chosen][:, None]).mean()
    assert table["metric"]["small"] == pytest.approx(float(expected), abs=1e-5)
    difference = us.compare(*(run.assign_coords(layer=[0]) for run in runs)).iloc[-1]["raw_b_minus_a"]
    saved = json.loads((out / "table3" / "paper" / "findings.json").read_text())["findings"]
    assert f"{difference:+.4f}" in saved[0]["figures"]


@pytest.mark.usefixtures("masked")
def test_what_a_family_lacks_is_told(tmp_path):
    setting = ManySetting("paper", tmp_path / "out")
    with pytest.raises(UnderstudyError, match="The ViT family is measured on 512 ImageNet-1K pictures: give a folder"):
        table3.run(setting)
    with pytest.raises(UnderstudyError, match=r"no family 'gpt': there are vit, bert, qwen2\.5"):
        table3.run(replace(setting, family="gpt"))
    with pytest.raises(UnderstudyError, match="and their classes with --labels"):
        table3.run(replace(setting, family="vit", images=tmp_path))
    with pytest.raises(UnderstudyError, match=r"The data set nowhere/nothing could not be opened"):
        table3.run(replace(setting, family="bert"))
    with pytest.raises(UnderstudyError, match="trains on ImageNet-100: give its folder with --images"):
        figure2.run(setting)
    with pytest.raises(UnderstudyError, match="measured on a probe set: give --images or --texts"):
        figure2.run(replace(setting, checkpoints=tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("table4", "--model", "digits"),
            "--model says nothing to table4 at scale mini: it takes --seeds, --corpus, --engine",
        ),
        (("table1", "--seeds", "2"), "--seeds says nothing to table1 at scale mini: it takes --model"),
        (("table5", "--scale", "huge"), "--scale huge is not possible: table5 has mini and paper"),
        (("table4", "--corpus", "nowhere"), "The corpus nowhere is not there"),
        (("table4", "--seeds", "0"), "--seeds 0 is not possible"),
        (("table3", "--texts", "nowhere.txt"), "--texts says nothing to table3 at scale mini"),
        (("table3", "--scale", "paper", "--seeds", "3"), "--seeds says nothing to table3 at scale paper"),
        (("figure2", "--texts", "nowhere.txt"), "--texts is for --checkpoints"),
        (("figure2", "--checkpoints", "x", "--seeds", "2"), "--seeds is for trainings: checkpoints are of one"),
    ],
)
def test_options_that_say_nothing_are_refused(options, said, tmp_path):
    result = run("reproduce", *options, "--out", tmp_path)
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    result = run("reproduce", "table4", "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot be written into: File exists" in result.output.replace("\n", " ")


def test_every_study_says_what_it_needs():
    assert {study.name for study in OF_MANY} == {"table3", "table4", "table5", "figure2"}
    assert all(set(study.needs) == {"mini", "paper"} for study in OF_MANY)


def test_a_trend_inside_the_spread_is_unresolved():
    above, inside, below = Contrast(0.2, 0.1, 0.3), Contrast(0.2, -0.1, 0.5), Contrast(-0.2, -0.3, -0.1)
    assert Finding.beyond_spread("", {"a": above, "b": above}).holds is True
    assert Finding.beyond_spread("", {"a": above, "b": inside}).holds is None
    assert Finding.beyond_spread("", {"a": inside, "b": below}).holds is False
    assert Finding.beyond_spread("", {"a": over_seeds([0.5])}).holds is None  # one seed has no spread
    assert Finding.beyond_spread("", {"a": over_seeds([0.5, float("nan"), 0.5])}).holds is None


def test_contrasts_are_taken_within_seeds():
    """The seeds differ by far more than the models: only a contrast within each sees the difference."""
    index = pd.MultiIndex.from_product([["a", "b"], [0, 1, 2]], names=["model", "seed"])
    found = pd.DataFrame({"raw": [1.0, 5.0, 9.0, 1.1, 5.11, 9.09]}, index=index)
    contrast = within_seeds(found, lambda seed: seed["raw"]["b"] - seed["raw"]["a"])
    assert contrast.value == pytest.approx(0.1)
    assert contrast.low > 0.05


def test_tables_of_seeds_keep_the_order_and_say_what_their_ends_are():
    measured = us.measure(us.load("digits"), us.digits(4), search="grid:3")
    from understudy.metric import Metric
    from understudy.scaling.family import Point

    points = [Point(name, seed, 10, Metric("loss", seed, 1), measured) for seed in (0, 1) for name in ("z", "a")]
    seeds = figures(points, resamples=50)
    table = mean_over_seeds(seeds)
    assert list(table.index) == ["z", "a"]
    assert (table["metric_low"] == 0).all()
    assert (table["metric_high"] == 1).all()
    one = mean_over_seeds(figures(points[:2], resamples=50))
    assert "metric_low" not in one
    assert (one["raw_low"] < one["raw"]).all()
    whole = us.summary(measured, resamples=0).iloc[-1]
    assert one["raw"]["z"] == pytest.approx(whole["raw"])
    assert one["effective_rank"]["z"] == pytest.approx(6 * whole["rank"])


def test_the_metric_of_a_causal_model_is_the_loss_of_its_tokens_without_padding():
    model = build("gpt2", torch.float32)
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    found = task_metric(model, us.Inputs.of({"input_ids": ids, "attention_mask": mask}))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits.double().log_softmax(-1)
    losses = [-float(logits[row, at, ids[row, at + 1]]) for row in range(3) for at in range(8) if mask[row, at + 1]]
    assert found.count == len(losses) == 8 + 5 + 8
    assert found.value == pytest.approx(np.mean(losses), abs=1e-5)


def test_a_metric_without_labels_is_told():
    pixels = us.digits(2).batch([0, 1])["pixel_values"]
    with pytest.raises(UnderstudyError, match="bring no labels, so how good the model is cannot be said"):
        task_metric(us.load("digits"), us.Inputs.of({"pixel_values": pixels}))
