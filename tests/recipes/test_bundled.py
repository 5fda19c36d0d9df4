"""The models that ship are as good as their cards say."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from understudy import bundled
from understudy.errors import UnderstudyError
from understudy.inputs.digits import digits
from understudy.inputs.stdlib import encode, stdlib, training_files
from understudy.metric import task_metric
from understudy.recipes import RECIPES
from understudy.recipes.stdlib import unigram_loss

MEGABYTES = 1_000_000


def test_every_recipe_is_bundled() -> None:
    assert set(RECIPES) == set(bundled.NAMES)


def test_all_bundled_models_together_are_small() -> None:
    files = [path for name in bundled.NAMES for path in bundled.folder(name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6 * MEGABYTES
    assert not any(path.suffix in {".bin", ".pt", ".pkl"} for path in files)


@pytest.mark.parametrize(("name", "heads"), [("digits", 6), ("digits-12", 12)])
def test_digits_models_know_digits_that_they_never_saw(name: str, heads: int) -> None:
    model = AutoModelForImageClassification.from_pretrained(bundled.folder(name), use_safetensors=True)
    found = task_metric(model, digits()).value
    assert model.config.num_attention_heads == heads
    assert found >= 0.97
    assert f"{found:.2%}" in (bundled.folder(name) / "README.md").read_text()


def test_the_language_model_beats_the_unigram_model_by_far() -> None:
    folder = bundled.folder("stdlib")
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    inputs = stdlib(64)
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    stream = torch.tensor([token for file in encode(tokenizer, training_files()[::20]) for token in file])
    assert task_metric(model, inputs).value < unigram_loss(stream, len(model.transformer.wte.weight), inputs) - 2


@pytest.mark.parametrize("name", bundled.NAMES)
def test_most_heads_matter_in_every_layer_as_the_card_says(name: str) -> None:
    card = (bundled.folder(name) / "README.md").read_text()
    shares = [float(share) for share in re.findall(r"valid sources, layer \d+ \| ([\d.]+)%", card)]
    assert len(shares) == 4
    assert min(shares) >= 90


def test_a_model_that_is_not_bundled_is_told() -> None:
    with pytest.raises(
        UnderstudyError, match=r"^No model 'gpt5' is bundled; the bundled models are digits, digits-12,"
    ):
        bundled.folder("gpt5")
