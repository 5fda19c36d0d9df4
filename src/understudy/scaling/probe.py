"""A probe: a callback of `transformers.Trainer` that measures a model while it is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from torch import Tensor, nn
from transformers import TrainerCallback

from understudy.anatomy import anatomy
from understudy.capture import peek
from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs, as_inputs
from understudy.measurement import measure
from understudy.metric import task_metric
from understudy.organize.summary import summary
from understudy.scaling.trajectory import similarity, trajectory
from understudy.search import Search, as_search
from understudy.surgery import opened
from understudy.worker import Layers, resolve_layers

log = logging.getLogger(__name__)


class Probe(TrainerCallback):  # type: ignore[misc]
    """Measures a model on a fixed probe set while it is trained, and logs it like any other metric.

    >>> probe = Probe(inputs, at=100)  # every hundred steps, and at the end  # doctest: +SKIP
    >>> probe.watch(trainer)  # so that its figures go where the Trainer's go  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> probe.trajectory().similarity  # of each measured graph with the last one  # doctest: +SKIP

    inputs: the probe set; the same for all measurements.
    at: every so many steps or epochs, or a list of them; the last step is always measured. unit: which of the two.
    layers, search: as in `measure`. "estimate" is close to free; the paper takes "grid:16".
    scored: inputs with labels, or texts, on which the task metric is computed each time.
    out: a folder for the runs. A training that goes on from a checkpoint goes on with the measurements that belong to
        it; those of later steps are removed.

    The Trainer's own weights, random numbers and gradients are not touched: a training with a probe ends in the same
    weights as one without. `trainer.add_callback(probe)` measures too, but then only `state.log_history` is told.
    """

    def __init__(
        self,
        inputs: Inputs | Mapping[str, Tensor],
        *,
        at: int | Sequence[int],
        unit: Literal["steps", "epochs"] = "steps",
        layers: Layers = "quarters",
        search: str | Search = "estimate",
        scored: Inputs | None = None,
        out: str | Path | None = None,
    ) -> None:
        if unit not in ("steps", "epochs"):
            raise UnderstudyError(f"unit={unit!r} is not possible: say 'steps' or 'epochs'.")
        chosen = int(at) if isinstance(at, Integral) else [int(each) for each in at]  # type: ignore[union-attr]
        wanted = [chosen] if isinstance(chosen, int) else chosen
        if not wanted or min(wanted) < (1 if isinstance(chosen, int) else 0):
            raise UnderstudyError(f"at={at!r} is not possible: give a number of {unit} above 0, or a list of them.")
        self.inputs, self.scored = as_inputs(inputs), scored
        self._at, self._unit = chosen, unit
        self._layers, self._search = layers, search
        self._out = None if out is None else Path(out)
        self._runs: dict[int, xr.Dataset] = {}
        self._trainer: Any = None

    @property
    def runs(self) -> list[xr.Dataset]:
        """What was measured, in the order of the steps."""
        return [self._runs[step] for step in sorted(self._runs)]

    def trajectory(self) -> xr.Dataset:
        """How the organization formed: see `understudy.scaling.trajectory`."""
        return trajectory(self.runs)

    def watch(self, trainer: Any) -> None:
        """Add the probe to a Trainer, and log through it: to TensorBoard, W&B, wherever it reports."""
        self._trainer = trainer
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        """See that the probe set fits, before hours are spent, and go on with what belongs to the checkpoint."""
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise UnderstudyError(
                "A probe measures a whole model, but FSDP and DeepSpeed keep it in parts: save checkpoints, and "
                "measure these with understudy.scaling.checkpoints.measure_checkpoints."
            )
        with opened(model):  # a dropout would draw random numbers that the training misses
            peek(anatomy(model), self.inputs.batch([0]))
        self._runs.clear()  # of a training before
        if self._out is not None and state.is_world_process_zero:
            self._go_on(int(state.global_step), model)
        # The untrained model, or that of a checkpoint whose run was lost with the process.
        epoch = float(state.epoch or 0.0)
        now = int(state.global_step) if self._unit == "steps" else round(epoch)
        if (self._unit == "steps" or abs(epoch - now) < 1e-9) and self._wanted(now):
            self._measure(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        """Measure after a step that was asked for, and after the last."""
        step = int(state.global_step)
        # Here and not at the end of the training: by then the best weights may have taken the place of the last.
        if (self._unit == "steps" and self._wanted(step)) or step >= state.max_steps:
            self._measure(state, model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        """Measure after an epoch that was asked for."""
        if self._unit == "epochs" and self._wanted(round(float(state.epoch))):
            self._measure(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        """Measure the last step of a training that ended early, with which all others are compared."""
        if getattr(args, "load_best_model_at_end", False):
            if int(state.global_step) not in self._runs:
                log.warning("The training ended early with its best weights: its last step was not measured.")
            return
        self._measure(state, model)

    def _wanted(self, now: int) -> bool:
        if isinstance(self._at, int):
            return now > 0 and now % self._at == 0
        return now in self._at

    def _measure(self, state: Any, model: nn.Module) -> None:
        step = int(state.global_step)
        if not state.is_world_process_zero or step in self._runs:
            return
        run = measure(model, self.inputs, layers=self._layers, search=self._search)
        run.attrs |= {"step": step, "epoch": float(state.epoch or 0.0)}
        if self.scored is not None:
            metric = task_metric(model, self.scored)
            run.attrs |= {"metric": metric.value, "metric_name": metric.name}
        before = max(self._runs, default=None)
        figures = _figures(run, None if before is None else self._runs[before])
        self._runs[step] = run
        if self._out is not None:
            write_run(run, self._out)
        log.info("step %d: %s", step, figures)
        if self._trainer is not None:
            self._trainer.log(figures)
        else:
            state.log_history.append({**figures, "step": step, "epoch": state.epoch})

    def _go_on(self, step: int, model: nn.Module) -> None:
        """Take up the runs until a step; those after it belong to a training that did not go on."""
        assert self._out is not None
        self._out.mkdir(parents=True, exist_ok=True)
        layers = list(resolve_layers(anatomy(model), self._layers))
        asked = {"inputs_hash": self.inputs.fingerprint(), "search": as_search(self._search).name, "layers": layers}
        said = {"inputs_hash": "probe set", "search": "search", "layers": "choice of layers"}
        for path, run in runs_in(self._out).items():
            for key, value in asked.items():
                there = run.attrs.get(key, ())
                if (np.atleast_1d(there).tolist() if key == "layers" else there) != value:
                    raise UnderstudyError(
                        f"{path} was measured on another {said[key]}: give the same, or another folder than "
                        f"{self._out}."
                    )
            if int(run.attrs["step"]) > step:
                log.warning("%s is of a training that was not gone on with: it is removed.", path)
                path.unlink()
            else:
                self._runs[int(run.attrs["step"])] = run


def write_run(run: xr.Dataset, folder: Path) -> Path:
    """Write the run of a step; what stands under its name is whole.

    NetCDF, one file each: a probe's runs are small, and a Zarr store of as little takes twenty times as long.
    """
    final = folder / f"step-{int(run.attrs['step']):07d}.nc"
    part = final.with_suffix(".part")
    run.drop_encoding().to_netcdf(part, engine="scipy")
    return part.replace(final)


def runs_in(folder: Path) -> dict[Path, xr.Dataset]:
    """The runs of a trajectory that a folder holds, in the order of their steps."""
    found = {}
    for path in sorted(folder.glob("step-*.nc")):
        with xr.open_dataset(path, engine="scipy") as run:
            found[path] = run.load()
    return found


def _figures(run: xr.Dataset, before: xr.Dataset | None) -> dict[str, float]:
    """What is logged of a run: means over layers, Raw and Rank/H of each, and how far the graph has moved."""
    table = summary(run, resamples=0)
    names = {"raw": "raw", "matched2": "matched2", "cover": "cover50", "rank": "rank", "valid": "valid"}
    whole = {f"cfs_{name}": float(table[column].iloc[-1]) for name, column in names.items()}
    whole["cfs_drop"] = float(run["drop"].mean())
    for at, layer in enumerate(run["layer"].to_numpy()):
        whole |= {f"cfs_{name}_layer{layer}": float(table[name].iloc[at]) for name in ("raw", "rank")}
    if "metric" in run.attrs:
        whole[f"cfs_{run.attrs['metric_name']}"] = float(run.attrs["metric"])
    if before is not None:
        alike = similarity(run, before)
        if np.isfinite(alike).any():
            whole["cfs_similarity_to_previous"] = float(np.nanmean(alike))
    return {name: value for name, value in whole.items() if np.isfinite(value)}
