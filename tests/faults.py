"""What happens to long runs, done for real: each fault returns what was done and what it left, or fails.

    python tests/faults.py    prints the table

The tests do the same with fewer repetitions.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import understudy as us
from understudy.store import MEASURED

NOBODY = 65534
WHOLE = {"layers": [0, 3], "search": "grid:6", "shard": 2}
COUNT = 24

# Children share this process's modules, so that a run begins at once and most moments are moments of work.
_fork = multiprocessing.get_context("fork")


@functools.cache
def _given() -> tuple[torch.nn.Module, us.Inputs]:
    return us.load("digits"), us.digits(COUNT)


def measure(**options: object) -> xr.Dataset:
    return us.measure(*_given(), **WHOLE, **options)


@functools.cache
def undisturbed() -> xr.Dataset:
    return measure()


def same(run: xr.Dataset, truth: xr.Dataset) -> None:
    """Bit for bit: the same configuration gives the same numbers."""
    for name in ("substitutability", "compensation", "damage", "drop", "noise", "evaluations", "status"):
        np.testing.assert_array_equal(run[name].values, truth[name].values, err_msg=name)


def _measure(out: Path, *, slowly: float = 0.0, user: int | None = None, said: Path | None = None) -> None:
    """A process that measures into a store, and says how it ended."""
    torch.set_num_threads(1)
    if user is not None:
        os.setuid(user)
    try:
        measure(out=out, progress=lambda *_: time.sleep(slowly))
        ended = "finished"
    except us.UnderstudyError as problem:
        ended = f"{type(problem).__name__}: {problem}"
    if said is not None:
        said.write_text(ended)


def _started(*args: object, **options: object) -> multiprocessing.Process:
    process = _fork.Process(target=_measure, args=args, kwargs=options)
    process.start()
    return process


def _shards(out: Path) -> int:
    return len(list(out.glob("status/c/*")))


def _until(ready, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "the run did not get that far"
        time.sleep(0.005)


def killed(folder: Path, times: int = 20) -> str:
    """SIGKILL at random moments of one run, each time continued."""
    out, chance = folder / "run.zarr", random.Random(0)
    undisturbed()
    kept = []
    for _ in range(times):
        process = _started(out, slowly=0.003)
        time.sleep(chance.uniform(0.1, 1.2))
        process.kill()
        process.join()
        kept.append(_shards(out))
    assert kept == sorted(kept), "a finished shard was lost"
    assert kept[-1] > 0, "the run never got anywhere"
    same(measure(out=out), undisturbed())
    return f"{times} times in one run; shards kept after each: {', '.join(map(str, kept))}; then equal bit for bit"


def interrupted(folder: Path) -> str:
    """Ctrl-C, as the shell sends it."""
    out = folder / "run.zarr"
    command = [sys.executable, "-m", "understudy", "measure", "digits", "--layers", "0,3", "--search", "grid:6"]
    command += ["--count", "256", "--shard", "2", "--out", str(out)]
    # What runs in the background of a shell ignores the signal, and so would its children.
    listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listening)
    _until(lambda: _shards(out) > 1, 120)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "the same command goes on" in " ".join(said.split()), said
    assert "Traceback" not in said, said
    live = us.open_run(out)
    assert 0 < live.sizes["input"] < 256
    return f"exit code 130; {live.sizes['input']} of 256 inputs kept, and said so"


def disk_full(folder: Path) -> str:
    """A file system of 300 KB, in a mount namespace of its own; then a larger one."""
    out = folder / "disk" / "run.zarr"
    out.parent.mkdir()
    measure = f"{sys.executable} -m understudy measure digits --layers 0,3 --search grid:6 --count {COUNT} --shard 2"
    script = f"""
        mount -t tmpfs -o size=300k tmpfs {out.parent} || exit 99
        {measure} --out {out} 2> {folder}/first; echo $? > {folder}/code
        ls {out}/status/c | wc -l > {folder}/kept
        mount -o remount,size=64m {out.parent}
        {measure} --out {out} > {folder}/second 2>&1 || exit 98
        cp -r {out} {folder}/copy.zarr
    """
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script], capture_output=True)
    if done.returncode in (1, 99, 127) and not (folder / "code").exists():
        raise NotPossible("a small file system cannot be mounted here")
    first = " ".join((folder / "first").read_text().split())
    assert (folder / "code").read_text().strip() == "1", first
    assert "cannot be written: No space left on device" in first, first
    assert done.returncode == 0, (folder / "second").read_text()
    same(us.open_run(folder / "copy.zarr"), undisturbed())
    kept = int((folder / "kept").read_text())
    assert 0 < kept < COUNT // 2
    return (
        f"exit code 1 after {kept} of {COUNT // 2} shards; with more space the same command went on, equal bit for bit"
    )


def read_only(folder: Path) -> str:
    """The store's folders lose their write permission half way."""
    place = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    out, said = place / "run.zarr", place / "said"
    measure(out=folder / "first.zarr")  # everything is imported before the rights are given up
    user = None
    if os.geteuid() == 0:  # permissions do not bind root
        user = NOBODY
        shutil.chown(place, user, user)
    process = _started(out, slowly=0.01, user=user, said=said)
    _until(lambda: _shards(out) > 2)
    folders = [part for part in out.rglob("*") if part.is_dir()]
    for part in folders:
        part.chmod(0o555)
    process.join(60)
    ended = said.read_text()
    for part in folders:
        part.chmod(0o755)
    assert ended.startswith("Unfinished"), ended
    assert "cannot be written: Permission denied. What was finished before is kept" in ended, ended
    kept = _shards(out)
    same(measure(out=out), undisturbed())
    shutil.rmtree(place)
    return f"stopped after {kept} of {COUNT // 2} shards with the reason; writable again it went on, equal bit for bit"


def damaged_shards(folder: Path, kinds: int = 4) -> str:
    """Chunks of a finished run truncated, bit-flipped, emptied and removed: one of every variable, in turn."""
    from understudy.store import VARIABLES

    out, truth = folder / "run.zarr", undisturbed()
    done = 0
    measure(out=out)
    for index, name in enumerate(VARIABLES):
        chunk = sorted(path for path in (out / name / "c").rglob("*") if path.is_file())[index]
        whole = chunk.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 8
        harms = (whole[: len(whole) // 2], bytes(flipped), b"", None)
        for harm in [harms[(index + kind) % 4] for kind in range(kinds)]:
            chunk.unlink()
            if harm is not None:
                chunk.write_bytes(harm)
            try:
                us.open_run(out)
            except us.UnderstudyError:
                done += 1
            else:  # the status is gone: the shard is simply not there
                assert (name, harm) == ("status", None), f"{name} was harmed and opened"
            same(measure(out=out), truth)
    return (
        f"{4 * len(VARIABLES)} harms; all seen ({done} refused on opening, 1 a shard not there), measured again, equal"
    )


def two_writers(folder: Path) -> str:
    """A second process on the same store."""
    out = folder / "run.zarr"
    process = _started(out, slowly=0.02)
    try:
        _until(lambda: _shards(out) > 0)
        live = us.open_run(out)
        assert 0 < live.sizes["input"] < COUNT
        assert live.attrs["asked"] == COUNT
        assert np.isfinite(live["drop"].values).all()
        with pytest.raises(us.UnderstudyError, match="is being written by another process"):
            measure(out=out)
    finally:
        process.kill()
        process.join()
    same(measure(out=out), undisturbed())
    return "the second was refused; the first was read while it wrote"


def not_a_number(folder: Path) -> str:
    """A model that yields NaN on some inputs."""
    clean = us.digits(COUNT)
    bad = {5, 6, 17}

    def load(indices):
        batch = clean.batch(indices)
        for row, index in enumerate(indices):
            if index in bad:
                batch["pixel_values"][row, 0, 3, 3] = torch.nan
        return batch

    inputs = us.Inputs(clean.ids, load, clean.about)
    run = us.measure(_given()[0], inputs, **WHOLE, out=folder / "run.zarr")
    truth = undisturbed()
    good = [index for index in range(COUNT) if index not in bad]
    assert (run["status"].values[good] == MEASURED).all()
    for index in bad:
        assert "not a number" in str(run["status"].values[index])
        assert np.isnan(run["drop"].values[index]).all()
    np.testing.assert_allclose(run["drop"].values[good], truth["drop"].values[good], rtol=1e-3)
    np.testing.assert_allclose(run["substitutability"].values[good], truth["substitutability"].values[good], atol=1e-4)
    assert us.summary(run).loc["all", "inputs"] == len(good)
    return f"{len(bad)} of {COUNT} inputs marked with the reason, the others complete"


def out_of_memory(folder: Path) -> str:
    """An address space too small for the budget that was given."""
    said = folder / "said.json"

    def child() -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.set_num_threads(1)
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 40_000,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2)).eval()
        ids = torch.randint(40_000, (6, 48), generator=torch.Generator().manual_seed(0))
        options = {"layers": 0, "search": "grid:4", "shard": 2}
        truth = us.measure(model, {"input_ids": ids}, **options, budget=2**27)
        warned: list[str] = []
        logging.getLogger("understudy").setLevel(logging.WARNING)
        handler = logging.Handler()
        handler.emit = lambda record: warned.append(record.getMessage())
        logging.getLogger("understudy").addHandler(handler)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + 400 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        run = us.measure(model, {"input_ids": ids}, **options, budget=2**33, out=folder / "run.zarr")
        far = float(np.nanmax(np.abs(run["substitutability"].values - truth["substitutability"].values)))
        group = json.loads((folder / "run.zarr" / "zarr.json").read_text())["attributes"]
        said.write_text(json.dumps({"warned": warned, "far": far, "budget": group["budget"]}))

    process = _fork.Process(target=child)
    process.start()
    process.join(300)
    assert said.exists(), "the run died"
    found = json.loads(said.read_text())
    shrunk = [line for line in found["warned"] if "Memory ran out" in line]
    assert shrunk
    assert found["far"] < 1e-4
    assert found["budget"] == 2**33 >> len(shrunk)  # once for all shards: the size that worked is remembered
    final = f"{found['budget'] >> 20} MiB"
    return f"the budget shrank {len(shrunk)} times to {final} and stayed there; S within {found['far']:.0e}"


def actor_killed(folder: Path) -> str:
    """SIGKILL to the process of a Ray actor, twice in one run."""
    import psutil

    from understudy.engines.ray import Ray

    out, killed = folder / "run.zarr", []

    def kill(*_: object) -> None:
        """After the first and after the fourth shard."""
        if len(killed) < 2 and _shards(out) >= 3 * len(killed):
            for process in psutil.process_iter(["cmdline"]):
                if (process.info["cmdline"] or [""])[0].startswith("ray::_Replica"):
                    process.kill()
                    killed.append(process.pid)
                    return

    same(measure(out=out, engine=Ray(workers=2), progress=kill), undisturbed())
    assert len(killed) == 2
    return "Ray started others in their place and repeated their shards; equal bit for bit"


def unreadable_inputs(folder: Path) -> str:
    """An empty text, one that is not UTF-8, and a truncated picture among good ones."""
    from PIL import Image
    from transformers import ViTImageProcessor

    texts, pictures = folder / "texts", folder / "pictures"
    texts.mkdir()
    pictures.mkdir()
    for name, content in {"a": b"import os", "b": b" ", "c": b"\xff\xfe", "d": b"x = 1"}.items():
        (texts / f"{name}.txt").write_bytes(content)
    command = [sys.executable, "-m", "understudy", "measure", "stdlib", "--texts", str(texts), "--search", "grid:3"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2, refused.stderr
    assert "Text 'b.txt' is empty" in refused.stderr, refused.stderr
    skipped = subprocess.run([*command, "--skip-bad"], capture_output=True, text=True)
    assert skipped.returncode == 0, skipped.stderr
    assert "2 inputs were skipped (b.txt" in " ".join(skipped.stdout.split()), skipped.stdout
    for name in ("a", "b"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 20, 3), dtype=np.uint8)).save(
            pictures / f"{name}.png"
        )
    whole = (pictures / "b.png").read_bytes()
    (pictures / "b.png").write_bytes(whole[: len(whole) // 2])
    given = {"model": _given()[0], "processor": ViTImageProcessor(size={"height": 8, "width": 8})}
    with pytest.raises(us.UnderstudyError, match=r"b\.png cannot be read as an image"):
        us.images(pictures, **given)
    assert list(us.images(pictures, **given, bad="skip").skipped) == ["b.png"]
    return "refused by name before anything was measured; with the flag skipped, and named in the run"


class NotPossible(Exception):
    """This machine cannot do that to a run."""


FAULTS = (
    killed,
    interrupted,
    disk_full,
    read_only,
    damaged_shards,
    two_writers,
    not_a_number,
    out_of_memory,
    actor_killed,
    unreadable_inputs,
)


def main() -> None:
    """Print what was done, and what it left."""
    for fault in FAULTS:
        folder = Path(tempfile.mkdtemp())
        try:
            left = fault(folder)
        except NotPossible as reason:
            left = f"not done: {reason}"
        finally:
            shutil.rmtree(folder)
        print(f"{fault.__name__}\n  done: {fault.__doc__}\n  left: {left}", flush=True)


if __name__ == "__main__":
    logging.getLogger("understudy").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    main()
