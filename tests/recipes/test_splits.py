"""What is held out stays held out."""

import importlib
import sysconfig
from pathlib import Path

import pytest
import torch

from understudy.errors import UnderstudyError
from understudy.inputs.digits import digits, training_digits
from understudy.inputs.stdlib import held_out_files, stdlib, training_files

stdlib_module = importlib.import_module("understudy.inputs.stdlib")  # the package may export the function


def test_digits_are_held_out_or_trained_on_and_never_both() -> None:
    unseen, seen = set(digits().ids), set(training_digits().ids)
    assert not unseen & seen
    assert len(unseen) + len(seen) == 1797
    assert len(unseen) >= 500


def test_no_held_out_image_occurs_again_among_the_training_images() -> None:
    unseen = digits().batch(range(len(digits())))["pixel_values"].flatten(1)
    seen = training_digits().batch(range(len(training_digits())))["pixel_values"].flatten(1)
    assert torch.cdist(unseen, seen).min() > 0


def test_an_id_names_the_image_of_the_data_set() -> None:
    from sklearn.datasets import load_digits

    inputs = digits(5)
    batch = inputs.batch(range(5))
    data = load_digits()
    indices = [int(name.removeprefix("digit-")) for name in inputs.ids]
    assert batch["labels"].tolist() == data.target[indices].tolist()
    assert torch.equal((batch["pixel_values"][:, 0] + 1) * 8, torch.tensor(data.images[indices], dtype=torch.float32))


def test_fewer_digits_are_the_first_of_more_and_show_every_class() -> None:
    assert digits().ids[:32] == digits(32).ids
    assert digits(32).batch(range(32))["labels"].unique().numel() == 10


@pytest.mark.parametrize("count", [0, 600])
def test_a_wrong_count_of_digits_is_told(count: int) -> None:
    with pytest.raises(UnderstudyError, match=f"^{count} held-out digits were asked for; there are 1 to 599\\.$"):
        digits(count)


def test_files_are_held_out_or_trained_on_and_never_both() -> None:
    unseen, seen = set(held_out_files()), set(training_files())
    assert not unseen & seen
    assert 0.05 < len(unseen) / len(unseen | seen) < 0.15
    assert "json/decoder.py" in unseen | seen
    assert not any("test" in Path(name).parts or "site-packages" in name for name in unseen | seen)


def test_a_file_keeps_its_side_whatever_else_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of Python has other files; those that both have stay on their side."""
    before = set(held_out_files())
    for name in [*sorted(before)[:5], *training_files()[:5], "a_new_module.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    kept = training_files()[:5]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    stdlib_module._files.cache_clear()
    try:
        assert set(held_out_files()) - {"a_new_module.py"} == set(sorted(before)[:5])
        assert set(kept) <= set(training_files())
    finally:
        stdlib_module._files.cache_clear()


def test_every_file_gives_one_context_before_any_gives_two() -> None:
    files = [name.rsplit(":", 1)[0] for name in stdlib(40).ids]
    assert len(set(files)) == 40
    assert set(files) <= set(held_out_files())
    more = stdlib(200)
    assert more.ids[:40] == stdlib(40).ids
    assert len(set(more.ids)) == 200


def test_a_context_is_the_text_at_its_place() -> None:
    from transformers import AutoTokenizer

    from understudy import bundled

    inputs = stdlib(3, length=32)
    tokenizer = AutoTokenizer.from_pretrained(bundled.folder("stdlib"))
    batch = inputs.batch(range(3))
    assert batch["attention_mask"].all()
    for name, row in zip(inputs.ids, batch["input_ids"], strict=True):
        file, offset = name.rsplit(":", 1)
        [text] = stdlib_module.read([file])
        assert tokenizer(text)["input_ids"][int(offset) : int(offset) + 32] == row.tolist()
        assert tokenizer.decode(row) in text


def test_too_many_contexts_are_told() -> None:
    with pytest.raises(
        UnderstudyError, match=r"^1000000 contexts of 128 tokens were asked for; the \d+ held-out files"
    ):
        stdlib(1_000_000)


def test_contexts_longer_than_the_model_reads_are_told() -> None:
    with pytest.raises(UnderstudyError, match=r"^Contexts of 129 tokens were asked for; .* reads 2 to 128\.$"):
        stdlib(length=129)


def test_a_python_without_its_source_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    stdlib_module._files.cache_clear()
    try:
        with pytest.raises(UnderstudyError, match=r"^The source of the standard library is not on this machine: "):
            stdlib()
    finally:
        stdlib_module._files.cache_clear()
