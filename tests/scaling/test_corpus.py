"""Corpora keep what is held out apart, and tell what is too small before anything is trained."""

from __future__ import annotations

import json

import numpy as np
import pytest

from understudy.errors import UnderstudyError
from understudy.inputs.corpus import HubTexts, corpus
from understudy.inputs.tokens import Tokens, tokenized

WORDS = ("the", "heads", "of", "a", "layer", "stand", "in", "for", "one", "another", "when", "is", "gone")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(30):
        text = " ".join(rng.choice(WORDS, 200))
        (tmp_path / f"{number:02d}.txt").write_text(f"document {number} {text}")
    return tmp_path


def parts(source):
    documents = corpus(source)
    return list(documents.training()), list(documents.held_out())


def test_documents_of_a_folder_are_on_one_side_each_and_stay_there(folder):
    training, held_out = parts(folder)
    assert (len(training), len(held_out)) == (27, 3)
    assert not set(training) & set(held_out)
    assert parts(folder) == (training, held_out)


def test_lines_of_a_file_are_documents(tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(20)))
    training, held_out = parts(tmp_path / "lines.txt")
    assert sorted([*training, *held_out]) == sorted(f"line {number}" for number in range(20))
    assert len(held_out) == 2


def test_a_data_set_is_read_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"story": f"story {number}", "other": 1}) for number in range(20)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    training, held_out = parts(f"hub:{tmp_path / 'data'}::train:story")
    assert held_out == ["story 0", "story 10"]
    assert len(training) == 18
    with pytest.raises(UnderstudyError, match="has no column 'text': it has story, other"):
        parts(f"hub:{tmp_path / 'data'}")
    with pytest.raises(UnderstudyError, match="could not be opened: the hub could not be reached"):
        parts(f"hub:{tmp_path / 'data'}::nowhere:story")


@pytest.mark.parametrize("text", ["hub:", "hub:a:b:c:d:e"])
def test_what_is_no_data_set_is_told(text):
    with pytest.raises(UnderstudyError, match=r"write hub:NAME\[:CONFIG\[:SPLIT\[:COLUMN\]\]\]"):
        HubTexts.of(text)


def test_wrong_corpora_are_told(tmp_path):
    with pytest.raises(UnderstudyError, match=r"is not there: give a folder of \.txt files"):
        corpus(tmp_path / "none")
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(UnderstudyError, match=r"has 1 \.txt files: give at least two"):
        parts(tmp_path)
    with pytest.raises(UnderstudyError, match="has 1 lines: give two or more"):
        parts(tmp_path / "one.txt")
    (tmp_path / "two.txt").write_bytes(b"\xff\xfe broken")
    with pytest.raises(UnderstudyError, match=r"The document two\.txt is not UTF-8"):
        parts(tmp_path)


def test_tokens_are_made_once_and_give_contexts_that_were_never_trained_on(folder, tmp_path):
    text = tokenized(corpus(folder), tmp_path / "tokens", vocabulary=300, tokens=2000, held_out=400)
    assert len(text.training) == 2000
    assert len(text.held_out) == 400
    written = (tmp_path / "tokens" / "training.bin").stat().st_mtime_ns
    again = tokenized(corpus(folder), tmp_path / "tokens", vocabulary=300, tokens=2000, held_out=400)
    assert (tmp_path / "tokens" / "training.bin").stat().st_mtime_ns == written
    assert again.about == text.about

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(text.tokenizer_file))
    first = next(iter(corpus(folder).held_out()))
    assert tokenizer.decode(text.held_out[:50].tolist()) in first
    inputs = text.contexts(4, 50)
    assert np.array_equal(inputs.batch([1])["input_ids"][0], text.held_out[100:150])  # spread evenly: every other one
    with pytest.raises(UnderstudyError, match=r"9 held-out contexts of 50 tokens were asked for; .* gives 8"):
        text.contexts(9, 50)
    with pytest.raises(UnderstudyError, match="holds the tokens of another corpus or budget"):
        tokenized(corpus(folder), tmp_path / "tokens", vocabulary=400, tokens=2000, held_out=400)


def test_tokens_of_documents_that_have_changed_are_not_taken(folder, tmp_path):
    tokenized(corpus(folder), tmp_path / "tokens", vocabulary=300, tokens=2000, held_out=400)
    (folder / "00.txt").write_text("another text altogether")
    with pytest.raises(UnderstudyError, match="or its documents have changed since"):
        tokenized(corpus(folder), tmp_path / "tokens", vocabulary=300, tokens=2000, held_out=400)


def test_a_corpus_too_small_for_the_budget_is_told(folder, tmp_path):
    with pytest.raises(
        UnderstudyError, match=r"training tokens, but a budget of 1,000,000 tokens needs at least 250,000"
    ):
        tokenized(corpus(folder), tmp_path / "tokens", vocabulary=300, tokens=1_000_000, held_out=10)
    assert not (tmp_path / "tokens" / "tokens.json").exists()


def test_what_was_interrupted_is_made_again(folder, tmp_path):
    text = tokenized(corpus(folder), tmp_path / "a", vocabulary=300, tokens=2000, held_out=100)
    (tmp_path / "a" / "tokens.json").unlink()
    (tmp_path / "a" / "training.bin").write_bytes(b"half")
    again = tokenized(corpus(folder), tmp_path / "a", vocabulary=300, tokens=2000, held_out=100)
    assert again.about == text.about
    assert np.array_equal(Tokens(tmp_path / "a").training, again.training)
