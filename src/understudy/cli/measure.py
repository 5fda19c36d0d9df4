"""understudy measure: a model, inputs, and what stands in for what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli import arguments as given
from understudy.cli.console import err, out, progress, verb

EXAMPLES = """
**Examples**

`understudy measure digits --layers all --out digits.zarr`

`understudy measure google/vit-base-patch16-224 --images photos/ --out vit.zarr`

`understudy measure bert-base-uncased --head masked --masked-texts sentences.txt`

`understudy measure ./my-llama --texts contexts/ --layers quarters --search grid:16`
"""


@verb
def measure(
    model: given.ModelName,
    images: given.Images = None,
    texts: given.Texts = None,
    masked_texts: given.MaskedTexts = None,
    count: given.Count = None,
    length: given.Length = 128,
    masks: given.Masks = 8,
    seed: given.Seed = 0,
    layers: Annotated[str, typer.Option(help="last, all, quarters, or layers such as 0,5,-1.")] = "last",
    units: Annotated[str, typer.Option(help="What is removed and rescaled: heads.")] = "heads",
    search: Annotated[
        str, typer.Option(help="How alpha is found: refine, grid:N, screen:K, estimate or estimate:K.")
    ] = "refine",
    outcome: Annotated[str, typer.Option(help="What is compared: auto, classes, masked, next or last.")] = "auto",
    threshold: Annotated[float, typer.Option(help="A source is valid if removing it costs more than this KL.")] = 1e-5,
    device: Annotated[str | None, typer.Option(help="Where to measure, for example cuda; by default the CPU.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Precision after the site: float32, float64, bfloat16.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs captured at once; chosen by default.")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="A Zarr store to write.")] = None,
    head: given.HeadName = None,
    revision: given.Revision = None,
    allow_pickle: given.AllowPickle = False,
) -> None:
    """Measure the substitutability of every pair of heads, on each input."""
    from understudy.cli.tables import provenance, summary_table
    from understudy.measurement import measure as run_measure

    network = given.open_model(model, head, revision, allow_pickle)
    inputs = given.open_inputs(
        model,
        network,
        images=images,
        texts=texts,
        masked_texts=masked_texts,
        count=count,
        length=length,
        masks=masks,
        seed=seed,
    )
    there = output is not None and output.exists()
    with progress(f"measuring {model}") as report:
        run = run_measure(
            network,
            inputs,
            layers=parse_layers(layers),
            units=units,
            search=search,
            outcome=outcome,
            threshold=threshold,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            out=output,
            progress=report,
        )
    out.print(provenance(run))
    out.print(summary_table(run))
    if float(run["substitutability"].notnull().sum()) == 0:
        largest = float(run["drop"].max())
        out.print(
            f"no source is valid: the largest D_drop is {largest:.1e}, the threshold {threshold:g}", highlight=False
        )
    if there:
        out.print(f"{output} already held this run; it was opened as it is", highlight=False, soft_wrap=True)
    elif output is not None:
        out.print(f"wrote {output}", highlight=False, soft_wrap=True)
    else:
        err.print("nothing was written; --out RUN.zarr keeps the run", style="dim", highlight=False)


def parse_layers(text: str) -> str | list[int]:
    """The layers as `measurement.measure` takes them: a word, or numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return text
