"""The recipe of `stdlib`: a small GPT-2 on the Python standard library's own source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from understudy.inputs.batch import Inputs
from understudy.inputs.stdlib import contexts, encode, held_out_files, read, training_files
from understudy.inputs.tokens import END, train_tokenizer
from understudy.metric import task_metric
from understudy.models import quietly
from understudy.recipes.card import card_figures, write_card
from understudy.recipes.gpt2 import Shape, gpt2, windows
from understudy.recipes.recipe import Progress
from understudy.recipes.record import Record
from understudy.recipes.trainer import fit, require_accelerate

if TYPE_CHECKING:
    pass

DATA = (
    "The source of the Python standard library of the Python that ran the recipe, under the licence of the Python "
    "Software Foundation (PSF). Left out: tests, idlelib, generated tables (encodings, pydoc_data) and files that are "
    "not UTF-8. A tenth of the files, chosen by a hash of their path, is held out: on every version of Python these "
    "files were never trained on. They are the inputs of `understudy.stdlib()`."
)


@dataclass(frozen=True)
class StdlibRecipe:
    """The hyperparameters of a byte-level GPT-2 of about a million parameters."""

    name: str = "stdlib"
    vocabulary: int = 1536  # a fifth of the parameters; more would starve the layers, which are what is studied
    layers: int = 4
    heads: int = 8
    width: int = 128
    context: int = 128  # tokens
    steps: int = 5000
    batch: int = 16  # contexts a step: many small steps learn more from ten million tokens than few large ones
    learning_rate: float = 3e-3  # small models bear far more than the usual 3e-4
    warmup: int = 200
    weight_decay: float = 0.1
    beta2: float = 0.99  # few tokens a step: the second moment needs a longer memory than 0.95 gives
    measured: int = 16  # held-out contexts for the figures of each layer on the card

    @property
    def summary(self) -> str:
        """One sentence that says what is trained on what."""
        shape = f"{self.layers} layers of {self.heads} heads, width {self.width}"
        return f"A GPT-2 ({shape}) trained on the source of the Python standard library."

    def train(self, out: Path, *, seed: int, progress: Progress | None, **arguments: Any) -> bool:
        """Train the tokenizer and the model into `out`."""
        require_accelerate()
        from transformers import PreTrainedTokenizerFast, set_seed

        tokenizer = train_tokenizer(read(training_files()), self.vocabulary)
        stream = training_stream(tokenizer)
        set_seed(seed)
        shape = Shape(self.layers, self.width, self.heads)
        end = tokenizer.token_to_id(END)
        model = gpt2(shape, vocabulary=tokenizer.get_vocab_size(), context=self.context, end=end)
        # Another cut of the stream in each epoch.
        load, count = windows(stream, self.context, lambda some: torch.randint(self.context, (len(some),)).tolist())
        writer = fit(
            model,
            load,
            count,
            out,
            recipe={key: value for key, value in asdict(self).items() if key != "measured"},
            defaults=self.arguments(),
            arguments=arguments,
            seed=seed,
            progress=progress,
        )
        if writer:
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, model_max_length=self.context)
            fast.save_pretrained(out)
        return writer

    def describe(self, out: Path) -> None:
        """Measure the model in `out` on the held-out files and write its card."""
        from tokenizers import Tokenizer
        from transformers import GPT2LMHeadModel

        with quietly():
            model = GPT2LMHeadModel.from_pretrained(out, use_safetensors=True)
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        stream, unseen = training_stream(tokenizer), contexts(tokenizer, None, self.context)
        loss, unigram = task_metric(model, unseen).value, unigram_loss(stream, tokenizer.get_vocab_size(), unseen)
        figures = {
            "held-out loss, nats a token": f"{loss:.4f}",
            "held-out perplexity": f"{exp(loss):.2f}",
            "held-out loss of the unigram model (training tokens, add one)": f"{unigram:.4f}",
            "held-out contexts": f"{len(unseen):,} of {self.context} tokens, from {len(held_out_files())} files",
            "training tokens": f"{len(stream):,}",
            "training tokens seen, over all epochs": f"{Record.load(out).examples * self.context:,}",
            "parameters": f"{model.num_parameters():,}",
            **card_figures(model, unseen.take(range(min(self.measured, len(unseen))))),
        }
        write_card(out, name=self.name, summary=self.summary, figures=figures, data=DATA)

    def arguments(self) -> dict[str, Any]:
        """The recipe in the words of `transformers.TrainingArguments`."""
        return {
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": self.warmup,
            "weight_decay": self.weight_decay,
            "adam_beta2": self.beta2,
        }


STDLIB = StdlibRecipe()


def training_stream(tokenizer: Any) -> Tensor:
    """The tokens of all training files, one after the other, each followed by the end token."""
    end = tokenizer.token_to_id(END)
    return torch.tensor([token for file in encode(tokenizer, training_files()) for token in (*file, end)])


def unigram_loss(stream: Tensor, vocabulary: int, inputs: Inputs) -> float:
    """The same loss of the model that knows only how often each token occurs in `stream`, plus one."""
    counts = torch.bincount(stream, minlength=vocabulary).double() + 1
    targets = inputs.batch(range(len(inputs)))["input_ids"][:, 1:]
    return float(-(counts / counts.sum()).log()[targets].mean())
