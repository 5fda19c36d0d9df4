"""Table 6: how far CFS is seen in forward states, and how far in downstream gradients."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import torch
import xarray as xr

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.inputs.digits import training_digits
from understudy.lens.signals import signals
from understudy.measurement import measure
from understudy.reproduce.study import Finding, Report, Setting, Study, put_after
from understudy.routing.evaluate import SEEDS
from understudy.routing.features import FORWARD, SOURCES, features
from understudy.routing.probes import Examples, predicted, probe, score
from understudy.routing.splits import TRAINING  # Table 6 gives no counts

# Recovery, accuracy of the representative, Spearman.
PAPER = {
    "residual": (0.2204, 0.3685, 0.2553),
    "qk": (0.2251, 0.3882, 0.2718),
    "logits": (0.2232, 0.3824, 0.2678),
    "values": (0.2245, 0.3865, 0.2790),
    "AV": (0.2236, 0.3853, 0.2732),
    "contributions": (0.2247, 0.3903, 0.2793),
    "gradient": (0.2643, 0.5068, 0.4701),
    "taylor": (0.2318, np.nan, np.nan),
    "oracle": (0.3231, np.nan, np.nan),
}
FIGURES = ("recovery", "accuracy", "spearman")
# The paper's model, and those on which it saw the same gap.
PRESETS = {
    "DeiT-S": "facebook/deit-small-patch16-224",
    "ViT-S AugReg": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
    "DINO ViT-S": "facebook/dino-vits16",
    "BERT on SST-2": "textattack/bert-base-uncased-SST-2",
    "BERT on MNLI": "textattack/bert-base-uncased-MNLI",
}
HELD_OUT, VALIDATION = 512, 8  # inputs that no probe is fitted to, at most; an eighth of them validates
LEAST = 8
# A row that was tuned and one that was not are not on the same footing: a reader must know which is which.
TUNING = (
    "of some fifteen forms of the gradient's features and six ways to fit, those with good figures on digits-12 are "
    "used; forward features have one form, untuned. With raw slopes, a smaller step and more epochs the gradients were "
    "below every forward feature there"
)


def run(setting: Setting) -> Report:
    """The same predictor on each source of information at the last layer, three seeds; the targets by `refine`."""
    training, held_out = _inputs(setting)
    first = max(1, len(held_out) // VALIDATION)  # of those held out, the first validate and the others test
    test = held_out.take(range(first, len(held_out)))
    taught = measure(setting.model, training, progress=setting.bar("training"))
    truth = measure(setting.model, held_out, progress=setting.bar("held out"))
    S, S_held = (torch.from_numpy(found["substitutability"].to_numpy()[:, 0]).float() for found in (taught, truth))
    seen, seen_held = (
        features(setting.model, inputs, progress=setting.bar("features")) for inputs in (training, held_out)
    )
    said: dict[str, list[np.ndarray]] = {name: [] for name in SOURCES}
    bar, steps = setting.bar("probes"), len(SOURCES) * len(SEEDS)
    for name in SOURCES:
        for seed in SEEDS:
            validation = Examples(seen_held[name][:first], S_held[:first])
            network = probe(Examples(seen[name], S), validation, seed=seed)
            said[name].append(predicted(network, seen_held[name][first:]))
            if bar is not None:
                bar(sum(map(len, said.values())), steps)
    measured = truth.isel(input=slice(first, None))
    everyone = {name: np.stack(each) for name, each in said.items()} | _without_predictor(setting, test, measured)
    scores = _scores(everyone, measured["substitutability"].to_numpy()[:, 0])
    table = _table(scores)
    data = {"training": taught, "held_out": truth, "predicted": _dataset(said, measured)}
    about = {
        "inputs": f"{len(training)} to fit, {first} to choose the epoch by, {len(test)} to test",
        "tuning": TUNING,
    }
    return Report({"observability": table}, _findings(table), data, about, {"seeds": scores})


def _inputs(setting: Setting) -> tuple[Inputs, Inputs]:
    """Inputs to fit to, and inputs held out."""
    if setting.scale == "mini" and not setting.own:
        held_out, pictures = setting.inputs(HELD_OUT), training_digits()
        # Fewer held-out digits ask for a quicker look: as many fewer to fit to, spread over the writers.
        count = max(LEAST, len(pictures) * len(held_out) // HELD_OUT)
        if count >= len(pictures):
            return pictures, held_out
        return pictures.take(np.linspace(0, len(pictures) - 1, count).round().astype(int).tolist()), held_out
    given = setting.inputs(TRAINING + HELD_OUT)
    if len(given) < LEAST:
        raise UnderstudyError(
            f"table6 fits, validates and tests on different inputs: it needs at least {LEAST}, but here are "
            f"{len(given)}."
        )
    count = len(given) - min(HELD_OUT, max(2, len(given) // 5))
    return given.take(range(count)), given.take(range(count, len(given)))


def _without_predictor(setting: Setting, test: Inputs, measured: xr.Dataset) -> dict[str, np.ndarray]:
    """Scores that nobody was taught, as if of one seed: `[1, inputs, source, substitute]`."""
    taylor = signals(setting.model, test, progress=setting.bar("Taylor"))["taylor"].to_numpy()[:, 0]
    estimate = measure(setting.model, test, search="estimate", progress=setting.bar("estimate"))
    return {
        "taylor": taylor[None, :, None],  # the same for every source
        "estimate": estimate["substitutability"].to_numpy()[:, 0][None],
        "oracle": measured["substitutability"].to_numpy()[:, 0][None],
    }


def _scores(everyone: dict[str, np.ndarray], S: np.ndarray) -> pd.DataFrame:
    """One row for each source of information and seed."""
    rows = {
        (name, seed): asdict(score(scores, S))
        for name, each in everyone.items()
        for seed, scores in zip(SEEDS if name in SOURCES else (0,), each, strict=True)
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["information", "seed"])


def _table(scores: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds, from the least to the largest of them, and the paper's figures."""
    each = scores.groupby(level="information", sort=False)
    table = each[["sources", "unscored", "constant"]].max()
    for at, name in reversed(list(enumerate(FIGURES))):
        paper = [PAPER.get(str(row), (np.nan,) * 3)[at] for row in table.index]
        table.insert(0, name, each[name].mean())
        for column, values in (("high", each[name].max()), ("low", each[name].min())):
            put_after(table, name, f"{name}_{column}", values)
        put_after(table, name, f"{name}_paper", pd.Series(paper, index=table.index))
    return table


def _dataset(said: dict[str, list[np.ndarray]], measured: xr.Dataset) -> xr.Dataset:
    """The predictions of every probe, for the inputs of a run."""
    dims = ("information", "seed", "input", "source", "substitute")
    coords = {name: measured[name].to_numpy() for name in dims[2:]}
    values = np.stack([np.stack(each) for each in said.values()])
    return xr.Dataset(
        {"predicted": (dims, values)}, {"information": list(said), "seed": list(SEEDS), **coords}, measured.attrs
    )


def _findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    recovery, spearman = table["recovery"], table["spearman"]
    forward = recovery[list(FORWARD)]
    apart, above = forward.max() - forward.min(), recovery["gradient"] - forward.max()
    return (
        *(
            Finding.of(
                f"Downstream gradients tell more than every forward feature, in {name}",
                f"{row['gradient']:.4f} against {row[list(FORWARD)].min():.4f} to {row[list(FORWARD)].max():.4f}",
                *((row["gradient"], row[other]) for other in FORWARD),
            )
            for name, row in (("recovery", recovery), ("rank correlation", spearman))
        ),
        Finding.of(
            "Forward features recover about the same: the best and the worst are nearer to each other than the best to "
            "the gradients",
            f"{apart:.4f} apart, the gradients {above:+.4f} above the best",
            (above, apart),
        ),
        Finding.of(
            "Beyond the paper: the estimate, which nobody was taught, tells more than a probe of gradients",
            f"recovery {recovery['estimate']:.4f} against {recovery['gradient']:.4f}, rank correlation "
            f"{spearman['estimate']:.4f} against {spearman['gradient']:.4f}",
            (recovery["estimate"], recovery["gradient"]),
            (spearman["estimate"], spearman["gradient"]),
        ),
    )


STUDY = Study(
    "table6",
    "What shows CFS without intervening (section 6.1, Table 6)",
    {"mini": "digits-12", "paper": PRESETS["DeiT-S"]},
    {
        "mini": "the bundled digits-12 model; 1,198 digits that it was trained on to fit probes, 64 held-out ones to "
        "validate, 448 to test; about four minutes",
        "paper": "DeiT-S from the hub and 4,608 ImageNet images in a folder, in random order: the last fifth is held "
        "out, at most 512, and the first eighth of these validates. With --model also on "
        + ", ".join(f"{name} ({where})" for name, where in PRESETS.items() if name != "DeiT-S")
        + "; a checkpoint without a classifier, as DINO's, needs one first",
    },
    run,
)
