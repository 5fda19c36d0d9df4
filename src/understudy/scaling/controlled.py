"""Controlled scaling: GPT-2 shapes that differ in one thing, trained alike from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import UnderstudyError
from understudy.inputs.batch import Inputs
from understudy.inputs.corpus import corpus
from understudy.inputs.tokens import Tokens, tokenized
from understudy.recipes.gpt2 import Budget, Gpt2Recipe, Shape, parameters
from understudy.scaling.family import Member, SharedProtocol, trained_member


@dataclass(frozen=True)
class Controlled:
    """One budget for all, and the axes: each a name for its settings, from small to large.

    width: heads of one width, ever more of them. depth: ever more layers. heads: one capacity, cut ever finer.
    """

    budget: Budget
    width: Mapping[str, Shape]
    depth: Mapping[str, Shape]
    heads: Mapping[str, Shape]
    corpus: str = "stdlib"
    search: str = "grid:16"
    contexts: int = 32  # held-out contexts of CFS
    length: int = 128  # their tokens
    scored: int = 512  # held-out contexts of the loss, of the training's length

    def __post_init__(self) -> None:
        if not set(self.width.values()) & set(self.depth.values()):
            raise UnderstudyError("Width and depth are compared from a shared baseline, but have no shape in common.")
        sizes = {name: self.parameters(shape) for name, shape in self.heads.items()}
        if len(set(sizes.values())) > 1:
            raise UnderstudyError(f"At fixed capacity all models have the same parameters, but these have {sizes}.")
        if self.length > self.budget.context:
            raise UnderstudyError(
                f"CFS on contexts of {self.length} tokens needs models that read them: these read "
                f"{self.budget.context}."
            )

    def parameters(self, shape: Shape) -> int:
        """The parameters of a shape, without making it."""
        return parameters(shape, vocabulary=self.budget.vocabulary, context=self.budget.context)


def axis_of_width(layers: int, widths: Sequence[int], head_width: int) -> dict[str, Shape]:
    """Ever more heads of one width."""
    return {f"W{width}": Shape.of_heads(layers, width, head_width) for width in widths}


def axis_of_depth(layers: Sequence[int], width: int, head_width: int) -> dict[str, Shape]:
    """Ever more layers."""
    return {f"D{count}": Shape.of_heads(count, width, head_width) for count in layers}


def axis_of_heads(layers: int, width: int, heads: Sequence[int]) -> dict[str, Shape]:
    """One capacity, cut into ever more heads."""
    shapes = [Shape(layers, width, count) for count in heads]
    return {f"{shape.heads}x{shape.head_width}": shape for shape in shapes}


# The paper's shapes in small: its numbers of heads, its ratios of width and depth, and a vocabulary that does not
# starve the layers.
MINI = Controlled(
    Budget(context=64, tokens=1_500_000, batch=16, learning_rate=3e-3, vocabulary=1024, beta2=0.99),
    width=axis_of_width(4, (72, 96, 144), 8),
    depth=axis_of_depth((3, 4, 6), 96, 8),
    heads=axis_of_heads(4, 96, (6, 12, 24)),
    search="refine",
    length=64,
)

# The paper states shapes and losses, no corpus and no budget: these are GPT-2's context and vocabulary, and twenty
# tokens for each parameter of the baseline.
PAPER = Controlled(
    Budget(
        context=1024,
        tokens=2_500_000_000,
        batch=16,
        accumulation=32,
        learning_rate=6e-4,
        vocabulary=50257,
        warmup=0.02,
    ),
    width=axis_of_width(12, (576, 768, 1152), 64),
    depth=axis_of_depth((9, 12, 18), 768, 64),
    heads=axis_of_heads(12, 768, (6, 12, 24)),
    corpus="hub:HuggingFaceFW/fineweb-edu:sample-10BT",
)


def shared_text(preset: Controlled, folder: Path) -> Tokens:
    """The tokens that all models of a preset share; a corpus too small for the budget is refused here."""
    name = "".join(letter if letter.isalnum() else "-" for letter in preset.corpus).strip("-")
    budget = preset.budget
    text = tokenized(
        corpus(preset.corpus),
        folder / f"tokens-{name}-{budget.vocabulary}-{budget.tokens}",
        vocabulary=budget.vocabulary,
        tokens=budget.tokens,
        held_out=preset.scored * budget.context,
    )
    measured_contexts(preset, text)  # held-out text that is too short shows before anything is trained
    scored_contexts(preset, text)
    return text


def measured_contexts(preset: Controlled, text: Tokens) -> Inputs:
    """The held-out contexts of CFS."""
    return text.contexts(preset.contexts, preset.length)


def scored_contexts(preset: Controlled, text: Tokens) -> Inputs:
    """The held-out contexts of the loss: as many as there are, up to the preset's number."""
    length = preset.budget.context
    return text.contexts(max(1, min(preset.scored, len(text.held_out) // length)), length)


def protocol(preset: Controlled, text: Tokens) -> SharedProtocol:
    """What every model is asked: CFS at quarters of the depth, the loss on more contexts."""
    measured, scored = measured_contexts(preset, text), scored_contexts(preset, text)
    return SharedProtocol(lambda _model: measured, lambda _model: scored, "quarters", preset.search)


def member(shape: Shape, preset: Controlled, text: Tokens, folder: Path, seed: int) -> Member:
    """A shape and a seed, trained in `folder` unless it is there."""
    recipe = Gpt2Recipe(f"gpt2-{shape.name}", shape, preset.budget, text)
    return trained_member(recipe, folder, seed)
