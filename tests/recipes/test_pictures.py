"""Any folder of labelled pictures can be trained on, and what is held out of it stays held out."""

import dataclasses
import json
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from transformers import AutoImageProcessor, TrainerCallback

import understudy as us
from understudy.errors import UnderstudyError
from understudy.inputs import pictures as module
from understudy.inputs.pictures import labelled_pictures
from understudy.recipes import RECIPES, train
from understudy.recipes.digits import DIGITS
from understudy.recipes.vit import VitRecipe, family, mirrored

SHAPES = ("circle", "cross", "square")
TINY = {"patch": 4, "layers": 2, "epochs": 1, "batch": 16, "warmup": 1, "measured": 4}


def drawn(shape: str, number: int, *, mode: str = "RGB", side: int = 16) -> Image.Image:
    """A shape of its own place, size and colour for each number."""
    chance = np.random.default_rng([SHAPES.index(shape), number])
    image = Image.new("RGB", (side, side + 2), tuple(chance.integers(0, 90, 3).tolist()))
    left, top = (int(value) for value in chance.integers(1, side // 3, 2))
    right, bottom = left + side // 2, top + side // 2
    colour = tuple(chance.integers(150, 256, 3).tolist())
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=colour)
    else:
        draw.line((left, top, right, bottom), fill=colour, width=3)
        draw.line((left, bottom, right, top), fill=colour, width=3)
    return image.convert(mode)


def write(place: Path, count: int, *, mode: str = "RGB", start: int = 0) -> Path:
    for shape in SHAPES:
        (place / shape).mkdir(parents=True, exist_ok=True)
        for number in range(start, start + count):
            drawn(shape, number, mode=mode).save(place / shape / f"{number:03d}.png")
    return place


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write(tmp_path / "shapes" / "train", 16)
    write(tmp_path / "shapes" / "test", 6, start=16)
    return tmp_path / "shapes"


def test_a_folder_with_a_split_keeps_it(split: Path) -> None:
    data = labelled_pictures(split, side=8)
    assert (data.name, data.side, data.channels, data.classes) == ("shapes", 8, 3, SHAPES)
    assert all(path.startswith("train/") for path in data.training.ids)
    assert all(path.startswith("test/") for path in data.held_out.ids)
    assert (len(data.training), len(data.held_out)) == (48, 18)
    assert "66 pictures" in data.about
    assert "48 to train on, 18 held out by the folder test/" in data.about


@pytest.mark.parametrize("name", ["val", "validation"])
def test_the_held_out_folder_has_three_names_and_one_without_classes_does_not_count(split: Path, name: str) -> None:
    (split / "test").rename(split / name)
    (split / "test").mkdir()
    (split / "test" / "unlabelled.png").touch()
    assert labelled_pictures(split, side=8).held_out.ids[0].startswith(f"{name}/")


def test_without_a_split_a_tenth_is_held_out_and_every_picture_keeps_its_side(tmp_path: Path) -> None:
    root = write(tmp_path / "shapes", 60)
    before = labelled_pictures(root, side=8)
    assert not set(before.training.ids) & set(before.held_out.ids)
    assert len(before.training) + len(before.held_out) == 180
    assert 0.05 < len(before.held_out) / 180 < 0.15
    write(root, 40, start=60)
    after = labelled_pictures(root, side=8)
    assert set(before.held_out.ids) <= set(after.held_out.ids)
    assert set(before.training.ids) <= set(after.training.ids)
    assert len(labelled_pictures(root, side=8, held_out=0.5).held_out) > 2 * len(after.held_out)


def test_labels_and_pixels_are_those_of_the_file(split: Path) -> None:
    data = labelled_pictures(split, side=8)
    batch = data.held_out.batch([3, 0])
    for row, place in enumerate([3, 0]):
        path = data.held_out.ids[place]
        assert data.classes[batch["labels"][row]] == path.split("/")[1]
        image = Image.open(split / path).resize((8, 8), Image.Resampling.BILINEAR)
        expected = torch.tensor(np.array(image)).permute(2, 0, 1) / 127.5 - 1
        assert torch.allclose(batch["pixel_values"][row], expected, atol=1e-6)
    assert batch["pixel_values"].min() >= -1
    assert batch["pixel_values"].max() <= 1


def test_every_beginning_is_a_fair_sample_even_of_classes_of_many_sizes(tmp_path: Path) -> None:
    write(tmp_path / "train", 4)
    sizes = {"circle": 40, "cross": 20, "square": 20}
    for shape, count in sizes.items():
        (tmp_path / "test" / shape).mkdir(parents=True)
        for number in range(count):
            drawn(shape, number).save(tmp_path / "test" / shape / f"{number}.png")
    ids = labelled_pictures(tmp_path, side=8).held_out.ids
    assert ids == labelled_pictures(tmp_path, side=8).held_out.ids
    for length in range(1, len(ids) + 1):
        found = Counter(path.split("/")[1] for path in ids[:length])
        assert all(abs(found[shape] - length * count / 80) <= 1 for shape, count in sizes.items())


def test_pictures_are_the_same_kept_or_decoded_for_each_batch(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = labelled_pictures(split, side=8)
    monkeypatch.setattr(module, "KEPT", 0)
    fresh = labelled_pictures(split, side=8)
    wanted = [5, 1, 1]
    assert torch.equal(kept.training.batch(wanted)["pixel_values"], fresh.training.batch(wanted)["pixel_values"])
    assert kept.training.fingerprint() == fresh.training.fingerprint()
    for path in (split / "train").rglob("*.png"):
        path.unlink()
    kept.training.batch(wanted)  # decoded once
    with pytest.raises(UnderstudyError, match="cannot be read as an image"):
        fresh.training.batch(wanted)


def test_kept_pixels_do_not_travel(split: Path) -> None:
    pixels = module._Pixels(sorted((split / "train").rglob("*.png")), 8, 3, keep=True)
    first = pixels([0])
    there = pickle.loads(pickle.dumps(pixels))
    assert there._kept is None
    assert torch.equal(there([0]), first)


def test_grey_pictures_have_one_channel_until_one_is_in_colour(tmp_path: Path) -> None:
    root = write(tmp_path / "shapes", 30, mode="L")
    drawn("cross", 99, mode="1").save(root / "cross" / "099.png")
    grey = labelled_pictures(root, side=8)
    assert grey.channels == 1
    assert "grey" in grey.about
    assert grey.training.batch([0, 1])["pixel_values"].shape == (2, 1, 8, 8)
    drawn("cross", 100).save(root / "cross" / "100.png")
    colour = labelled_pictures(root, side=8)
    assert colour.channels == 3
    place = colour.training.ids.index(grey.training.ids[0])
    three = colour.training.batch([place])["pixel_values"][0]
    assert torch.equal(three, grey.training.batch([0])["pixel_values"][0].expand(3, 8, 8))


def test_a_folder_is_told_from_another_of_its_name(split: Path) -> None:
    before = labelled_pictures(split, side=8)
    assert labelled_pictures(split, side=8).fingerprint == before.fingerprint
    drawn("circle", 50, side=40).save(split / "train" / "circle" / "000.png")
    assert labelled_pictures(split, side=8).fingerprint != before.fingerprint


def no_folder(root: Path) -> Path:
    return root / "nowhere"


def no_pictures(root: Path) -> Path:
    for name in SHAPES:
        (root / "empty" / name).mkdir(parents=True)
    return root / "empty"


def empty_class(root: Path) -> Path:
    (root / "train" / "star").mkdir()
    return root


def other_classes(root: Path) -> Path:
    (root / "train" / "circle").rename(root / "train" / "disc")
    return root


def few(root: Path) -> Path:
    return write(root / "few", 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_folder, r"nowhere is not a folder: give a folder that has one sub-folder of pictures a class\.$"),
        (lambda root: root / "train" / "circle", r"two classes or more, but its sub-folders are: none\. Give the"),
        (no_pictures, r"^There are no pictures in .*empty: files ending in \.jpg, "),
        (empty_class, r"^The class 'star' has no pictures: .*star holds no file ending in .* or remove the folder\.$"),
        (other_classes, r"same classes, but 2 are in one of them alone, such as 'disc' in train/\. Give both"),
        (few, r"^Of the 3 pictures in .*few only 0 are held out, fewer than its 3 classes: give more pictures, a"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(split: Path, spoil, message: str) -> None:
    with pytest.raises(UnderstudyError, match=message):
        labelled_pictures(spoil(split), side=8)


def test_a_class_that_is_held_out_whole_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnderstudyError, match=r"^Every picture of the class '\w+' in .* a smaller share held_out="):
        labelled_pictures(write(tmp_path / "few", 2), side=8, held_out=0.999)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": 0}, "side=0 is not possible: give the pixels of a side, 1 or more."),
        ({"side": 8, "held_out": 1.0}, "held_out=1.0 is not possible: give a share between 0 and 1, such as 0.1."),
    ],
)
def test_what_is_not_possible_is_told(split: Path, options: dict[str, float], message: str) -> None:
    with pytest.raises(UnderstudyError, match=f"^{re.escape(message)}$"):
        labelled_pictures(split, **options)


def test_an_unreadable_picture_is_named_before_anything_is_trained(split: Path, tmp_path: Path) -> None:
    whole = (split / "test" / "cross" / "018.png").read_bytes()
    (split / "test" / "cross" / "018.png").write_bytes(whole[: len(whole) // 2])
    steps = []
    [recipe] = family(labelled_pictures(split, side=8), [2], **TINY).values()
    with pytest.raises(UnderstudyError, match=r"test/cross/018\.png cannot be read as an image: "):
        train(recipe, tmp_path / "out", progress=lambda done, _: steps.append(done))
    assert not steps
    assert not (tmp_path / "out").exists()
    for path in (split / "train").rglob("*.png"):  # grey all through, so that every header is looked at
        Image.open(path).convert("L").save(path)
    (split / "train" / "cross" / "003.png").write_bytes(b"no picture")
    for path in (split / "test").rglob("*.png"):
        Image.new("L", (8, 8)).save(path)
    with pytest.raises(UnderstudyError, match=r"train/cross/003\.png cannot be read as an image: "):
        labelled_pictures(split, side=8)


def test_a_recipe_on_a_folder_runs_end_to_end_and_again_to_the_same_weights(split: Path, tmp_path: Path) -> None:
    data = labelled_pictures(split, side=8)
    recipe = VitRecipe("shapes", data, heads=2, head_width=4, flip=True, **TINY)
    first, again, other = (
        train(recipe, tmp_path / name, seed=seed, use_cpu=True)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    weights, same, others = (load_file(out / "model.safetensors") for out in (first, again, other))
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert not all(torch.equal(weights[key], others[key]) for key in weights)
    files = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "training.json"}
    assert {path.name for path in first.iterdir()} == files

    card = (first / "README.md").read_text()
    assert "A ViT (2 layers of 2 heads, width 8) trained on the 3 classes of pictures of shapes." in card
    assert "valid sources, layer 1" in card
    assert "of 18 pictures |" in card
    assert data.about in card
    told = json.loads((first / "training.json").read_text())["recipe"]
    assert (told["data"], told["side"], told["pictures"], told["flip"]) == ("shapes", 8, 48, True)
    assert told["fingerprint"] == data.fingerprint

    model = us.load(str(first))
    assert model.config.id2label == dict(enumerate(SHAPES))
    inputs = us.images(split / "test", model)
    order = [data.held_out.ids.index(f"test/{path}") for path in inputs.ids]
    ours, theirs = data.held_out.batch(order), inputs.batch(range(18))
    assert torch.allclose(ours["pixel_values"], theirs["pixel_values"], atol=1e-6)


def test_the_image_processor_of_a_grey_model_prepares_grey_pictures_as_in_training(tmp_path: Path) -> None:
    root = write(tmp_path / "shapes", 30, mode="L")
    data = labelled_pictures(root, side=8)
    [recipe] = family(data, [2], **TINY).values()
    out = tmp_path / "out"
    out.mkdir()
    recipe.train(out, seed=0, progress=None, use_cpu=True, max_steps=1)
    processor = AutoImageProcessor.from_pretrained(out)
    prepared = processor(images=Image.open(root / data.held_out.ids[0]), return_tensors="pt")
    assert torch.allclose(prepared["pixel_values"], data.held_out.batch([0])["pixel_values"], atol=1e-6)


def test_callbacks_see_the_training(split: Path, tmp_path: Path) -> None:
    class Seen(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **_):  # noqa: ARG002
            self.steps = state.global_step

    seen = Seen()
    [recipe] = family(labelled_pictures(split, side=8), [2], **TINY).values()
    (tmp_path / "out").mkdir()
    recipe.train(tmp_path / "out", seed=0, progress=None, callbacks=[seen], use_cpu=True)
    assert seen.steps == 3  # 48 pictures, 16 a step


def test_a_family_grows_by_heads_of_one_width() -> None:
    recipes = family(DIGITS.data, epochs=40)
    assert list(recipes) == ["digits-3x8", "digits-6x8", "digits-12x8"]
    models = [recipe.model() for recipe in recipes.values()]
    counts = [model.num_parameters() for model in models]
    assert counts == sorted(set(counts))
    assert [model.config.num_attention_heads for model in models] == [3, 6, 12]
    assert {model.config.hidden_size // model.config.num_attention_heads for model in models} == {8}
    assert {recipe.epochs for recipe in recipes.values()} == {40}


def test_the_bundled_recipes_are_told_apart_and_can_be_changed() -> None:
    changed = dataclasses.replace(RECIPES["digits"], epochs=1)
    assert changed.told() == {**DIGITS.told(), "epochs": 1}
    assert json.loads(json.dumps(DIGITS.told()))["data"] == "digits"
    assert DIGITS.summary == "A ViT (4 layers of 6 heads, width 48) trained on scikit-learn's handwritten digits."


def test_patches_that_do_not_divide_the_pictures_are_told() -> None:
    with pytest.raises(
        UnderstudyError,
        match=r"^Patches of 3 pixels do not divide the pictures of digits, 8 pixels wide: choose patch=1, 2, 4, 8, or",
    ):
        dataclasses.replace(DIGITS, patch=3)


def test_half_of_the_pictures_are_mirrored_and_none_is_otherwise_changed() -> None:
    pixels = torch.rand(64, 3, 4, 4)
    found = mirrored(pixels)
    turned = (found == pixels.flip(-1)).flatten(1).all(1)
    assert torch.equal(turned, ~(found == pixels).flatten(1).all(1))
    assert 10 < int(turned.sum()) < 54
