"""Inputs: batch dicts, images, texts, masked texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, ViTImageProcessor

import understudy as us
from families import VOCABULARY, build
from understudy.anatomy import anatomy
from understudy.inputs.chance import chance

Error = us.UnderstudyError


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def test_inputs_of_a_batch_dict():
    inputs = us.Inputs.of({"input_ids": torch.arange(6).view(3, 2)}, ids=["x", "y", "z"])
    assert len(inputs) == 3
    part = inputs.take([2, 0])
    assert part.ids == ("z", "x")
    assert part.batch([0, 1])["input_ids"].tolist() == [[4, 5], [0, 1]]
    assert (
        inputs.fingerprint()
        == us.Inputs.of({"input_ids": torch.arange(6).view(3, 2)}, ids=["x", "y", "z"]).fingerprint()
    )
    assert inputs.fingerprint() != part.fingerprint()
    with pytest.raises(Error, match="2 ids were given for 3 inputs"):
        us.Inputs.of({"a": torch.zeros(3)}, ids=["x", "y"])
    with pytest.raises(Error, match="Input ids must be unique, but 'x' occurs more than once"):
        us.Inputs.of({"a": torch.zeros(2)}, ids=["x", "x"])
    with pytest.raises(Error, match="There are no inputs"):
        us.Inputs.of({"a": torch.zeros(0, 3)})


def test_texts_are_padded_by_the_batch(tokenizer):
    inputs = us.texts(["a b c d", "e f"], build("bert"), tokenizer=tokenizer, length=5)
    both = inputs.batch([0, 1])
    assert both["input_ids"].tolist() == [[2, 5, 6, 7, 3], [2, 9, 10, 3, 0]]
    assert both["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert inputs.batch([1])["input_ids"].shape == (1, 4)


def test_texts_of_files_and_folders(tokenizer, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("a b\n\nc d\n")
    (tmp_path / "deep" / "a.txt").write_text("e")
    (tmp_path / "c.md").write_text("not a text")
    model = build("bert")
    assert us.texts(tmp_path, model, tokenizer=tokenizer).ids == ("b.txt", "deep/a.txt")
    assert us.texts(tmp_path / "b.txt", model, tokenizer=tokenizer).ids == ("b.txt:1", "b.txt:3")
    assert us.texts(tmp_path, model, tokenizer=tokenizer, count=1).ids == ("b.txt",)
    with pytest.raises(Error, match="3 texts were asked for; there are 2: ask for 1 to 2"):
        us.texts(tmp_path, model, tokenizer=tokenizer, count=3)
    with pytest.raises(Error, match="There are no texts in"):
        us.texts(_empty(tmp_path), model, tokenizer=tokenizer)
    with pytest.raises(Error, match=r"is not there: give a folder of .txt files"):
        us.texts(tmp_path / "none", model, tokenizer=tokenizer)
    with pytest.raises(Error, match="Text '1' is empty"):
        us.texts(["a", " "], model, tokenizer=tokenizer)
    with pytest.raises(Error, match=r"No tokenizer belongs to BertForMaskedLM: pass one with tokenizer="):
        us.texts(["a"], model)


def _empty(tmp_path):
    (tmp_path / "empty").mkdir(exist_ok=True)
    return tmp_path / "empty"


def test_masks_are_the_same_for_the_same_text_and_seed(tokenizer):
    model, text = build("bert"), ["a b c d e f g h i j k l", "m n"]
    first = us.masked_texts(text, model, tokenizer=tokenizer, masks=4)
    batch = first.batch([0, 1])
    assert batch["positions"].sum(-1).tolist() == [4, 2]
    assert ((batch["input_ids"] == 4) == batch["positions"]).all()
    assert not batch["positions"][:, 0].any()  # special tokens stay
    again = us.masked_texts(text[::-1], model, tokenizer=tokenizer, masks=4).batch([1])
    assert torch.equal(again["positions"][0], batch["positions"][0])
    other = us.masked_texts(text, model, tokenizer=tokenizer, masks=4, seed=1).batch([0])
    assert not torch.equal(other["positions"][0], batch["positions"][0])
    assert first.about["seed"] == 0
    run = us.measure(build("bert", torch.float32), first, search="grid:3")
    assert run.attrs["outcome"] == "masked"
    with pytest.raises(Error, match="masks must be at least 1"):
        us.masked_texts(text, model, tokenizer=tokenizer, masks=0)


def test_images_of_a_folder(tmp_path):
    (tmp_path / "cats").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (30, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cats" / "1.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.JPG", format="JPEG")
    (tmp_path / "readme.txt").write_text("no image")
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    inputs = us.images(tmp_path, build("vit"), processor=processor)
    assert inputs.ids == ("cats/1.png", "grey.JPG")
    assert inputs.batch([0, 1])["pixel_values"].shape == (2, 3, 8, 8)
    expected = processor(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    assert torch.equal(inputs.batch([0])["pixel_values"], expected)
    other = us.images(
        tmp_path, build("vit"), processor=ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=0.4)
    )
    assert other.fingerprint() != inputs.fingerprint()  # other pixels, other inputs
    bare = us.images(tmp_path, build("vit"), processor=lambda image: torch.ones(3, 8, 8) * image.width)
    assert bare.content is None  # a function tells nothing of itself: the pixels do
    with pytest.raises(Error, match=r"3 images were asked for; .* holds 2: ask for 1 to 2"):
        us.images(tmp_path, build("vit"), processor=processor, count=3)
    with pytest.raises(Error, match="There are no images in"):
        us.images(_empty(tmp_path), build("vit"), processor=processor)
    with pytest.raises(Error, match="is not a folder"):
        us.images(tmp_path / "grey.JPG", build("vit"), processor=processor)
    with pytest.raises(Error, match=r"No image processor belongs to ViTForImageClassification: pass one"):
        us.images(tmp_path, build("vit"))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(Error, match=r"broken.png cannot be read as an image"):
        us.images(tmp_path, build("vit"), processor=processor).batch([0])


def test_what_cannot_be_read_is_refused_by_name_or_skipped_and_named(tmp_path, tokenizer):
    pixels = np.random.default_rng(0).integers(0, 255, (30, 20, 3), dtype=np.uint8)
    for name in ("a", "b", "c", "d"):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.png").write_bytes(b"")
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    with pytest.raises(Error, match=r"b.png cannot be read as an image: .* bad='skip' \(--skip-bad\)"):
        us.images(tmp_path, build("vit"), processor=processor)
    inputs = us.images(tmp_path, build("vit"), processor=processor, bad="skip")
    assert inputs.ids == ("a.png", "d.png")
    assert set(inputs.skipped) == {"b.png", "c.png"}
    assert inputs.about["skipped"] == 2
    one = us.images(tmp_path, build("vit"), processor=processor, bad="skip", count=2)
    assert one.ids == ("a.png", "d.png")
    labelled = us.images(tmp_path, build("vit"), processor=processor, bad="skip", labels={"a.png": 3, "d.png": 1})
    assert labelled.batch([1, 0])["labels"].tolist() == [1, 3]
    with pytest.raises(Error, match=r"1 of 2 images have no label, such as d\.png"):
        us.images(tmp_path, build("vit"), processor=processor, bad="skip", labels={"a.png": 3})
    with pytest.raises(Error, match="bad='drop' is not possible: say 'refuse' or 'skip'"):
        us.images(tmp_path, build("vit"), processor=processor, bad="drop")

    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a b c")
    (folder / "b.txt").write_text("  \n")
    (folder / "c.txt").write_bytes(b"\xff\xfe a")
    with pytest.raises(Error, match=r"Text 'b.txt' is empty. .* bad='skip'"):
        us.texts(folder, build("gpt2"), tokenizer=tokenizer)
    texts = us.texts(folder, build("gpt2"), tokenizer=tokenizer, bad="skip")
    assert texts.ids == ("a.txt",)
    assert "is not UTF-8" in texts.skipped["c.txt"]
    with pytest.raises(Error, match="None of the 2 texts"):
        us.texts(["", " "], build("gpt2"), tokenizer=tokenizer, bad="skip")
    with pytest.raises(Error, match="length must be at least 1"):
        us.texts(folder, build("gpt2"), tokenizer=tokenizer, bad="skip", length=0)


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_chance_fits(name):
    body = anatomy(build(name))
    batch = chance(body)
    if name == "vit":
        assert batch["pixel_values"].shape == (3, 1, 8, 8)
    else:
        assert int(batch["input_ids"].max()) < VOCABULARY
        assert len(set(batch["positions"].sum(-1).tolist())) > 1
        assert not bool(batch["attention_mask"].all())
