"""`vitlens rollout`: attention followed through all layers."""

from typing import Annotated

import typer

from vitlens.cli.lists import one_of
from vitlens.cli.options import Data, Images, Model
from vitlens.names import DEFAULT_ALPHA, FUSIONS, Readout
from vitlens.runs.options import ModelOptions, RunOptions


def rollout(
    model: Model,
    *,
    images: Images = None,
    data: Data = None,
    fusion: Annotated[
        str, typer.Option("--fusion", metavar="LIST", help="How heads become one: mean, max, min (comma-separated).")
    ] = "mean,max,min",
    discard: Annotated[
        float, typer.Option("--discard", min=0, max=0.99, help="Fraction of the lowest weights to drop.")
    ] = 0.0,
    alpha: Annotated[
        float, typer.Option("--alpha", min=0, max=1, help="Share of the identity (the residual connection).")
    ] = DEFAULT_ALPHA,
    start_layer: Annotated[
        int, typer.Option("--start-layer", metavar="N", min=0, help="First layer of the product, from 0.")
    ] = 0,
    readout: Annotated[
        Readout | None, typer.Option("--readout", help="Row to read (default: what the model's classifier reads).")
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Attention rollout (Abnar & Zuidema 2020) over every image, with overlays."""
    fusions = one_of("--fusion", fusion, FUSIONS)  # a wrong word is said before torch is imported
    from vitlens.runs.rollout import rollout as run

    written = run(
        model,
        images=images,
        data=data,
        fusion=fusions,
        discard=discard,
        alpha=alpha,
        start_layer=start_layer,
        readout=readout,
        model_options=model_options,
        options=options,
    )
    typer.echo(written)
