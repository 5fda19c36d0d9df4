"""understudy route: teach a router, judge it, and run a model with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy import bundled
from understudy.cli import arguments as given
from understudy.cli.console import bars, out, progress, verb
from understudy.cli.findings import printed
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from torch import nn

    from understudy.inputs.batch import Inputs
    from understudy.routing.splits import Splits

app = typer.Typer(
    help="Keep, for each input, only the heads that it needs.", no_args_is_help=True, rich_markup_mode="markdown"
)

TRAIN_EXAMPLES = """
**Examples**

`understudy route train digits-12 --out router`

`understudy route train ./my-vit --images photos/ --layer 5 --keep 3,6 --out router`
"""
EVALUATE_EXAMPLES = """
**Examples**

`understudy route evaluate digits-12 router`

`understudy route evaluate digits-12 router another-router --keep 4`
"""
RUN_EXAMPLES = """
**Examples**

`understudy route run digits-12 router --keep 6`

`understudy route run ./my-vit router-10 router-11 --images photos/ --keep 3`
"""

Keep = Annotated[str | None, typer.Option(help="Heads that stay, such as 3,6,9 (a quarter, a half, three quarters).")]
Routers = Annotated[list[Path], typer.Argument(metavar="ROUTER...", help="Folders that `route train` has written.")]
Length = Annotated[int, typer.Option(help="Tokens of each text, at most.")]


@app.command("train", epilog=TRAIN_EXAMPLES)
@verb
def train(
    model: given.ModelName,
    images: given.Images = None,
    labels: given.Labels = None,
    texts: given.Texts = None,
    masked_texts: given.MaskedTexts = None,
    count: Annotated[int | None, typer.Option(help="Training inputs, at most; by default all (digits: 4,096).")] = None,
    length: Length = 128,
    masks: given.Masks = 8,
    skip_bad: given.SkipBad = False,
    head: given.HeadName = None,
    layer: Annotated[int, typer.Option(help="The layer that is routed; negatives count from the end.")] = -1,
    keep: Keep = None,
    stage: Annotated[str, typer.Option(help="R1: taught by pairs; R2: by joint subsets too.")] = "R2",
    search: Annotated[str, typer.Option(help="How pairs are measured: refine, grid:31, estimate, ...")] = "refine",
    seed: Annotated[int, typer.Option(help="Of the weights, the order and the subsets.")] = 17,
    epochs: Annotated[int | None, typer.Option(help="Of each fit.")] = None,
    output: Annotated[Path, typer.Option("--out", help="The folder of the router.")] = Path("router"),
) -> None:
    """Teach a router for one layer of a model.

    Of the inputs, a tenth (at most 448) is never looked at and is what `route evaluate` takes; another tenth (at most
    64) chooses the epoch. What is measured on the way stays in the folder, and goes on from there.
    """
    from dataclasses import replace

    from understudy.routing.fit import Settings
    from understudy.routing.teach import Teacher

    if stage not in ("R1", "R2"):
        raise UnderstudyError(f"--stage {stage} is not possible: say R1 or R2.")
    if epochs is not None and epochs < 1:
        raise UnderstudyError(f"--epochs {epochs} is not possible: give 1 or more.")
    budgets = _budgets(keep)
    opened = given.OpenInputs(model, images, texts, masked_texts, None, length, masks, 0, skip_bad, labels)
    network = given.OpenModel(model, head)()
    parts = _splits(opened, network)
    training = _first(parts.training, count)
    settings = Settings() if epochs is None else replace(Settings(), epochs=epochs)
    with bars() as bar:
        teacher = Teacher.of(
            network,
            training,
            parts.validation,
            layer=layer,
            keep=budgets,
            search=search,
            settings=settings,
            folder=output / "work",
            bar=bar,
        )
        router = teacher.pairs(seed=seed)
        if stage == "R2":
            router = teacher.subsets(router)
    router.save(output)
    card = router.card
    size = sum(value.numel() for value in router.network.parameters())
    out.print(
        f"{card.stage} for layer {card.layer} of {card.model}: {size:,} parameters, taught by "
        f"{len(training):,} inputs at budgets of {', '.join(map(str, card.keep))} of {card.units} heads",
        highlight=False,
    )
    out.print(f"wrote {output}; try: understudy route evaluate {model} {output}", highlight=False, soft_wrap=True)


@app.command("evaluate", epilog=EVALUATE_EXAMPLES)
@verb
def evaluate(
    model: given.ModelName,
    routers: Routers,
    images: given.Images = None,
    labels: given.Labels = None,
    texts: given.Texts = None,
    masked_texts: given.MaskedTexts = None,
    count: Annotated[int | None, typer.Option(help="Test inputs, at most; by default all.")] = None,
    length: Length = 128,
    masks: given.Masks = 8,
    skip_bad: given.SkipBad = False,
    head: given.HeadName = None,
    keep: Keep = None,
    no_oracle: Annotated[bool, typer.Option("--no-oracle", help="Do not run every subset.")] = False,
) -> None:
    """Judge routers of one layer on inputs that they have not seen, beside Taylor, size, chance and the joint oracle.

    The inputs are cut as `route train` cuts them, and the test part is taken.
    """
    from understudy.routing.evaluate import judge
    from understudy.routing.router import Router

    opened = given.OpenInputs(model, images, texts, masked_texts, None, length, masks, 0, skip_bad, labels)
    loaded = [Router.load(folder) for folder in routers]
    network = given.OpenModel(model, head)()
    test = _first(_splits(opened, network).test, count)
    with progress("test") as report:
        judged = judge(network, test, loaded, keep=_budgets(keep), oracle=not no_oracle, progress=report)
    table = judged.table().rename(columns={"kl_gap": "minus_taylor"})
    table = table.rename(columns={f"kl_gap_{end}": f"minus_taylor_{end}" for end in ("low", "high")})
    shown = ["kl", "minus_taylor", "minus_taylor_low", "minus_taylor_high", "fidelity", "correct"]
    out.print(printed(f"{len(test)} inputs, layer {loaded[0].card.layer}", table[shown]))
    if "dense_correct" in judged.policies:
        out.print(f"dense accuracy: {float(judged.policies['dense_correct'].mean()):.4f}", highlight=False)


@app.command("run", epilog=RUN_EXAMPLES)
@verb
def run(
    model: given.ModelName,
    routers: Routers,
    keep: Annotated[int, typer.Option(help="Heads that stay in each routed layer.")],
    images: given.Images = None,
    texts: given.Texts = None,
    masked_texts: given.MaskedTexts = None,
    count: given.Count = None,
    length: Length = 128,
    masks: given.Masks = 8,
    skip_bad: given.SkipBad = False,
    head: given.HeadName = None,
    batch: Annotated[int, typer.Option(help="Inputs that go through the model together.")] = 8,
    execution: Annotated[
        str, typer.Option(help="compact: only kept heads are computed; gated: the others become zero; auto.")
    ] = "auto",
) -> None:
    """Run a model with the heads that its routers keep: what is kept, what is lost, and how long it takes."""
    from understudy.routing.router import Router
    from understudy.routing.trial import trial

    if batch < 1:
        raise UnderstudyError(f"--batch {batch} is not possible: give 1 or more.")
    opened = given.OpenInputs(model, images, texts, masked_texts, count, length, masks, 0, skip_bad)
    loaded = [Router.load(folder) for folder in routers]
    network = given.OpenModel(model, head)()
    inputs = opened(network)
    with progress("routed") as report:
        found = trial(network, inputs, loaded, keep=keep, batch=batch, execution=execution, progress=report)
    out.print(printed(f"the first of {len(inputs)} inputs", found.inputs.head(10)))
    ratio = found.routed / found.dense
    out.print(
        f"KL to the dense model {found.kl:.2e}, same prediction {found.fidelity:.2%}; {1e3 * found.routed:.1f} ms a "
        f"batch of {batch} against {1e3 * found.dense:.1f} ms dense ({ratio:.2f} of it, "
        f"{'faster' if ratio < 1 else 'not faster'}), {found.execution}",
        highlight=False,
    )


def _budgets(keep: str | None) -> list[int] | None:
    if keep is None:
        return None
    try:
        return [int(part) for part in keep.split(",")]
    except ValueError:
        raise UnderstudyError(f"--keep {keep} is not possible: give whole numbers such as 3,6,9.") from None


def _splits(opened: given.OpenInputs, model: nn.Module) -> Splits:
    """The bundled digits have splits of their own; other inputs are cut in their order."""
    from understudy.routing.splits import digits_splits, split

    brought = any(option is not None for option in (opened.images, opened.texts, opened.masked_texts))
    if not brought and opened.name in bundled.NAMES and opened.name != "stdlib":
        return digits_splits()
    return split(opened(model))


def _first(inputs: Inputs, count: int | None) -> Inputs:
    if count is not None and count < 1:
        raise UnderstudyError(f"--count {count} is not possible: give 1 or more.")
    return inputs if count is None else inputs.take(range(min(count, len(inputs))))
