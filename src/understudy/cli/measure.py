"""understudy measure: a model, inputs, and what stands in for what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli import arguments as given
from understudy.cli.console import INTERRUPTED, err, out, progress, verb
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    import xarray as xr

    from understudy.engines import Engine

EXAMPLES = """
**Examples**

`understudy measure digits --layers all --out digits.zarr`

`understudy measure google/vit-base-patch16-224 --images photos/ --out vit.zarr`

`understudy measure bert-base-uncased --head masked --masked-texts sentences.txt --plan`

`understudy measure ./my-llama --texts contexts/ --layers quarters --search grid:16 --out llama.zarr`

`understudy measure ./my-llama --texts contexts/ --out llama.zarr --engine ray --address auto --gpus 1`
"""

_RUN, _CLUSTER = "The run", "A cluster"


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
    skip_bad: given.SkipBad = False,
    layers: Annotated[str, typer.Option(help="last, all, quarters, or layers such as 0,5,-1.")] = "last",
    units: given.Units = "heads",
    search: Annotated[
        str, typer.Option(help="How alpha is found: refine, grid:N, screen:K, estimate or estimate:K.")
    ] = "refine",
    outcome: Annotated[str, typer.Option(help="What is compared: auto, classes, masked, next or last.")] = "auto",
    threshold: Annotated[float, typer.Option(help="A source is valid if removing it costs more than this KL.")] = 1e-5,
    dtype: Annotated[str | None, typer.Option(help="Precision after the site: float32, float64, bfloat16.")] = None,
    head: given.HeadName = None,
    revision: given.Revision = None,
    allow_pickle: given.AllowPickle = False,
    trust_remote_code: given.TrustRemoteCode = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="A Zarr store to write. The same command again goes on where it stopped.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what the run would take, and do not run it.", rich_help_panel=_RUN)
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            help="For --plan: operations a second, such as 4e14; by default a few rows are timed.", rich_help_panel=_RUN
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to measure, for example cuda; by default the CPU.", rich_help_panel=_RUN),
    ] = None,
    device_map: given.DeviceMap = None,
    offload_folder: given.OffloadFolder = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Inputs captured at once; chosen by default.", rich_help_panel=_RUN)
    ] = None,
    budget: Annotated[
        float, typer.Option(help="GiB of memory to use above the model's own.", rich_help_panel=_RUN)
    ] = 1.0,
    shard: Annotated[
        int | None,
        typer.Option(
            help="Inputs that are written together; about ten seconds' work by default.", rich_help_panel=_RUN
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray.", rich_help_panel=_CLUSTER)] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="A Ray cluster that runs, or auto; without it one is started.", rich_help_panel=_CLUSTER),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Replicas of the model; by default all there is room for.", rich_help_panel=_CLUSTER),
    ] = None,
    gpus: Annotated[
        float, typer.Option(help="GPUs of each replica; a fraction shares one.", rich_help_panel=_CLUSTER)
    ] = 0.0,
    cpus: Annotated[float, typer.Option(help="CPUs of each replica.", rich_help_panel=_CLUSTER)] = 1.0,
) -> None:
    """Measure the substitutability of every pair of units, on each input."""
    from understudy.measurement import measure as run_measure

    network = given.OpenModel(
        model, head, revision, allow_pickle, trust_remote_code, device_map, offload_folder and offload_folder.absolute()
    )
    inputs = given.OpenInputs(model, images, texts, masked_texts, count, length, masks, seed, skip_bad)
    asked: dict[str, Any] = {"layers": parse_layers(layers), "units": units, "search": search, "outcome": outcome}
    asked["budget"] = int(budget * 2**30)
    if rate is not None and not plan:
        raise UnderstudyError("--rate is for --plan.")
    if plan:
        _print_plan(network, inputs, {**asked, "device": device, "dtype": dtype}, rate, workers or 1)
        return
    begun = False
    try:
        with progress(f"measuring {model}") as report:

            def reported(done: float, total: int) -> None:
                nonlocal begun
                begun = True
                report(done, total)

            run = run_measure(
                network.absolute(),
                inputs.absolute(),
                **asked,
                threshold=threshold,
                device=device,
                dtype=dtype,
                batch_size=batch_size,
                shard=shard,
                out=output,
                engine=_engine(engine, address, workers, gpus, cpus),
                progress=reported,
            )
    except KeyboardInterrupt:
        err.print(f"stopped. {_kept(output)}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    _print_run(run, output, there=not begun)


def _engine(name: str, address: str | None, workers: int | None, gpus: float, cpus: float) -> str | Engine:
    if name != "ray":
        if address is not None or workers is not None or gpus or cpus != 1.0:
            raise UnderstudyError("--address, --workers, --gpus and --cpus are for --engine ray.")
        return name
    from understudy.engines.ray import Ray

    return Ray(address=address, workers=workers, gpus=gpus, cpus=cpus)


def _kept(output: Path | None) -> str:
    from understudy.store import open_run

    if output is None:
        return "Nothing was kept: --out RUN.zarr keeps what is done."
    try:
        done = open_run(output, verify=False)
    except UnderstudyError:
        return "Nothing was done yet."
    count, asked = done.sizes["input"], done.attrs.get("asked", done.sizes["input"])
    return f"{count} of {asked} inputs are kept in {output}; the same command goes on."


def _print_run(run: xr.Dataset, output: Path | None, there: bool) -> None:
    from understudy.cli.tables import provenance, summary_table

    out.print(provenance(run))
    out.print(summary_table(run))
    if float(run["substitutability"].notnull().sum()) == 0:
        largest, threshold = float(run["drop"].max()), run.attrs["threshold"]
        out.print(
            f"no source is valid: the largest D_drop is {largest:.1e}, the threshold {threshold:g}", highlight=False
        )
    if output is None:
        err.print("nothing was written; --out RUN.zarr keeps the run", style="dim", highlight=False)
    else:
        said = f"{output} already held this run" if there else f"wrote {output}"
        out.print(said, highlight=False, soft_wrap=True)


def _print_plan(
    network: given.OpenModel, inputs: given.OpenInputs, asked: dict[str, Any], rate: float | None, workers: int
) -> None:
    from understudy.cli.tables import plan_table
    from understudy.planning import plan

    # A rate that is given needs no weights; else a few rows are timed here.
    model = network.skeleton() if rate is not None else network()
    with err.status("timing a few rows"):
        said = plan(model, inputs(model), **asked, rate=rate, workers=workers)
    out.print(plan_table(network.name, said, rate))


def parse_layers(text: str) -> str | list[int]:
    """The layers as `measurement.measure` takes them: a word, or numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return text
