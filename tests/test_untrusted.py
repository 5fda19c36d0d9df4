"""Files that were not written by us: any bytes give a clear error or a valid object, and nothing is executed."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import understudy as us
from families import build
from understudy import UnderstudyError as Error

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# Anything that JSON can hold, with what a run's own metadata holds among it.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "run.zarr"
    us.measure(us.load("digits"), us.digits(4), search="grid:3", shard=2, out=path)
    return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def write(folder, files):
    path = folder / "run.zarr"
    shutil.rmtree(path, ignore_errors=True)
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def opens_or_says(path):
    """A run with numbers, or one clear error; returns whether it opened."""
    try:
        run = us.open_run(path).load()
    except Error as problem:
        assert str(path) in str(problem)
        return False
    assert isinstance(run, xr.Dataset)
    assert set(run["substitutability"].dims) == {"input", "layer", "source", "substitute"}
    return True


@FUZZ
@given(data=st.data())
def test_any_bytes_in_any_file_of_a_run(store, tmp_path, data):
    name = data.draw(st.sampled_from(sorted(store)))
    whole = store[name]
    harmed = data.draw(
        st.one_of(
            st.binary(max_size=64),
            st.integers(0, max(0, len(whole) - 1)).map(lambda cut: whole[:cut]),
            st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 255)).map(
                lambda at: whole[: at[0]] + bytes([whole[at[0]] ^ at[1]] if whole else []) + whole[at[0] + 1 :]
            ),
        )
    )
    opens_or_says(write(tmp_path, {**store, name: harmed}))


@FUZZ
@given(data=st.data())
def test_any_value_in_the_metadata_of_a_run(store, tmp_path, data):
    root = json.loads(store[next(name for name in store if str(name) == "zarr.json")])
    place = root
    while True:  # down to some value
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = data.draw(JSON | st.sampled_from(["../../secret", [10**12], 10**9, -1, "pickle", "numcodecs.pickle"]))
    root_file = next(name for name in store if str(name) == "zarr.json")
    opens_or_says(write(tmp_path, {**store, root_file: json.dumps(root).encode()}))


def test_a_flipped_bit_in_a_chunk_is_always_seen(store, tmp_path):
    chunks = [name for name in store if "c" in name.parts and name.parts[0] != "status"]
    assert len(chunks) > 10
    for name in chunks:
        for at in (0, len(store[name]) // 2, len(store[name]) - 1):
            flipped = bytearray(store[name])
            flipped[at] ^= 16
            assert not opens_or_says(write(tmp_path, {**store, name: bytes(flipped)})), name


class Told:
    """What a pickle would run."""

    def __reduce__(self):
        return (open, ("executed", "w"))


def test_no_pickle_in_a_run_is_ever_read(store, tmp_path, monkeypatch):
    """Zarr's second format has a codec that unpickles, and xarray would use it."""
    import numcodecs
    import zarr

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=2)
    array = group.create_array("substitutability", shape=(1,), dtype="float64", filters=[])
    del array
    meta = json.loads((path / "substitutability" / ".zarray").read_text())
    meta |= {"dtype": "|O", "filters": [{"id": "pickle", "protocol": 5}], "fill_value": None, "compressor": None}
    (path / "substitutability" / ".zarray").write_text(json.dumps(meta))
    (path / "substitutability" / "0").write_bytes(numcodecs.Pickle().encode(np.array([Told()], dtype=object)))
    with pytest.raises(Error, match="is not a run"):
        us.open_run(path)
    root = next(name for name in store if str(name) == "zarr.json")
    changed = json.loads(store[root])
    changed["consolidated_metadata"]["metadata"]["drop"]["codecs"] = [{"name": "numcodecs.pickle"}]
    with pytest.raises(Error, match=r"uses the codec 'numcodecs\.pickle', which is not read"):
        us.open_run(write(tmp_path, {**store, root: json.dumps(changed).encode()}))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("place", ["drop", "drop/c", "damage/c/0", "stray"])
def test_nothing_outside_a_run_is_read_or_written(store, tmp_path, place):
    path = write(tmp_path, store)
    outside = tmp_path / "outside"
    if (path / place).exists():
        shutil.move(path / place, outside)
    else:
        outside.mkdir()
    (path / place).symlink_to(outside)
    with pytest.raises(Error, match=rf"holds a link \({place}\)"):
        us.open_run(path)
    with pytest.raises(Error, match="holds a link"):
        us.measure(us.load("digits"), us.digits(4), search="grid:3", out=path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("drop", "int32", "drop has the type int32, not float32"),
        ("layer", "float64", "layer has the type float64, not int64"),
    ],
)
def test_types_are_those_of_a_run(store, tmp_path, name, value, said):
    root = next(each for each in store if str(each) == "zarr.json")
    changed = json.loads(store[root])
    changed["consolidated_metadata"]["metadata"][name]["data_type"] = value
    with pytest.raises(Error, match=said):
        us.open_run(write(tmp_path, {**store, root: json.dumps(changed).encode()}))


def test_attributes_that_do_not_fit_the_identity_are_refused(store, tmp_path):
    root = next(each for each in store if str(each) == "zarr.json")
    changed = json.loads(store[root])
    changed["attributes"]["search"] = "grid:4"
    with pytest.raises(Error, match="its attributes do not fit its identity"):
        us.open_run(write(tmp_path, {**store, root: json.dumps(changed).encode()}))


def test_pickled_weights_and_code_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = build("bert", torch.float32)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"weights": Told()}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(Error, match="only as a pickle"):
        us.load(tmp_path / "model")
    with pytest.raises(Error):  # weights_only refuses what it cannot build
        us.load(tmp_path / "model", allow_pickle=True)
    build("bert", torch.float32).save_pretrained(tmp_path / "coded")
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    (tmp_path / "coded" / "code.py").write_text("open('executed', 'w')\nclass Config: pass\n")
    with pytest.raises(Error, match="trust_remote_code"):
        us.load(tmp_path / "coded")
    assert not (tmp_path / "executed").exists()


@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_any_bytes_in_a_config(tmp_path, data):
    folder = tmp_path / "model"
    if not folder.exists():
        build("gpt2", torch.float32).save_pretrained(folder)
        shutil.copy(folder / "config.json", tmp_path / "whole.json")
    whole = json.loads((tmp_path / "whole.json").read_text())
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=64))
    else:
        key = data.draw(st.sampled_from(sorted(whole)))
        content = json.dumps({**whole, key: data.draw(JSON)}).encode()
    (folder / "config.json").write_bytes(content)
    try:
        assert isinstance(us.load(folder), torch.nn.Module)
    except Error as problem:
        assert str(folder) in str(problem)
