"""Peak memory above the model's own, in a process of its own: whatever the vocabulary and the number of inputs.

python -m benchmarks.memory --vocabulary 150000 --inputs 16
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path

GIB = 2**30


def peak(*, vocabulary: int, inputs: int, tokens: int, search: str, budget: int = GIB) -> float:
    """Bytes above the model's own at the worst moment, over the budget."""
    command = [sys.executable, "-m", "benchmarks.memory", "--child", "--search", search, "--budget", str(budget)]
    command += ["--vocabulary", str(vocabulary), "--inputs", str(inputs), "--tokens", str(tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _child(options: argparse.Namespace) -> float:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import understudy as us

    logging.getLogger("understudy").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=options.tokens,
        initializer_range=0.2,
    )
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(options.vocabulary, (options.inputs, options.tokens))
    with torch.no_grad():
        model(ids[:1, :8])  # what torch itself takes once
    us.measure(model, {"input_ids": ids[:1, :8]}, layers=2, search="estimate", threshold=1e-300)
    before = status("VmRSS")
    us.measure(model, {"input_ids": ids}, layers=2, search=options.search, threshold=1e-300, budget=options.budget)
    return (status("VmHWM") - before) / options.budget


def status(name: str) -> int:
    """A size of this process, in bytes; VmHWM is the most it ever held (ru_maxrss would count the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main() -> None:
    """Print the peak over the budget for several vocabularies and numbers of inputs, or for one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--inputs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--search", default="estimate")
    parser.add_argument("--budget", type=int, default=GIB)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(_child(options))
        return
    given = vars(options)
    given.pop("child")
    print(json.dumps({**given, "peak_over_budget": peak(**given)}))


if __name__ == "__main__":
    main()
