"""The one way in which recipes use `transformers.Trainer`: quiet, and only inside the output folder."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Batch
from understudy.models import quietly
from understudy.recipes.recipe import Progress
from understudy.recipes.record import Record, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Arguments that say how a training is kept and shown, not what it is.
HOW = ("save_strategy", "save_steps", "save_total_limit", "resume_from_checkpoint", "report_to", "logging_dir")


def require_accelerate() -> None:
    """Fail early and clearly where the Trainer's own requirement is missing."""
    if importlib.util.find_spec("accelerate") is None:
        raise UnderstudyError('Training needs the package accelerate: pip install "understudy[train]"')


def fit(
    model: PreTrainedModel,
    load: Callable[[Sequence[int]], Batch],
    count: int,
    out: Path,
    *,
    recipe: Mapping[str, Any],
    defaults: Mapping[str, Any],
    arguments: Mapping[str, Any],
    seed: int,
    progress: Progress | None,
    callbacks: Sequence[Any] = (),
) -> bool:
    """Train `model` on the examples `load(indices)`, indices below `count`, and save it with a record into `out`.

    `defaults` are the recipe in the words of `transformers.TrainingArguments`, `arguments` what the user
    wants otherwise. Checkpoints, if they are asked for (`save_strategy="epoch"`), go to `out/checkpoints`, and
    `resume_from_checkpoint` goes on from one. A callback that has `watch` gets the Trainer by it.
    False on all but one process of a distributed run.
    """
    from transformers import PrinterCallback, TrainingArguments
    from transformers.trainer import TRAINING_ARGS_NAME

    checkpoints = out / "checkpoints"
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 50}
    options = TrainingArguments(
        output_dir=str(checkpoints),
        # Indices are the dataset and the collator loads them: whole batches are read, moved and cut at once.
        remove_unused_columns=False,
        **{"dataloader_pin_memory": torch.cuda.is_available(), **quiet, **defaults, "seed": seed, **arguments},
    )
    trainer = _trainer(model=model, args=options, train_dataset=range(count), data_collator=load)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_reporter(progress))
    for callback in callbacks:
        if hasattr(callback, "watch"):
            callback.watch(trainer)
        else:
            trainer.add_callback(callback)
    started = time.monotonic()
    with quietly():
        trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
        seconds = time.monotonic() - started
        trainer.save_model(str(out))
    if not trainer.is_world_process_zero():
        return False
    (out / TRAINING_ARGS_NAME).unlink()  # a pickle; the record says the same
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone, but a wheel is for all
    if not any(checkpoints.iterdir()):
        checkpoints.rmdir()
    steps = trainer.state.global_step
    batch = options.train_batch_size * options.gradient_accumulation_steps * options.world_size
    changed = {key: value for key, value in arguments.items() if key not in HOW}
    Record(recipe, changed, seed, steps, steps * batch, seconds, versions()).save(out)
    return True


def _trainer(**arguments: Any) -> Any:
    from transformers import Trainer

    class Resuming(Trainer):  # type: ignore[misc]
        """A Trainer that goes on with all weights of a checkpoint."""

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            # Files may have other names for weights than modules do (ViT). `from_pretrained` knows both; the Trainer's
            # own way leaves out, without a word, what it does not find.
            network = self.model if model is None else model
            saved = type(network).from_pretrained(resume_from_checkpoint, use_safetensors=True)
            network.load_state_dict(saved.state_dict())

    return Resuming(**arguments)


def _reporter(progress: Progress | None) -> Any:
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):  # type: ignore[misc]
        """Hands the Trainer's steps to `progress` and its losses to the log."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if progress is not None and state.is_world_process_zero:
                progress(state.global_step, state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:  # noqa: ARG002
            if "loss" in logs and state.is_world_process_zero:
                log.info("step %d of %d: loss %.4f", state.global_step, state.max_steps, float(logs["loss"]))

    return Reporter()


def epoch_counter() -> Any:
    """A callback whose `now` is the epoch that runs, also in a training that goes on from a checkpoint."""
    from transformers import TrainerCallback

    class EpochCounter(TrainerCallback):  # type: ignore[misc]
        now = 0

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            self.now = int(state.epoch or 0)

    return EpochCounter()
