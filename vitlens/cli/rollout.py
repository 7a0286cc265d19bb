"""`vitlens rollout`: attention followed through all layers, in several ways."""

from typing import Annotated

import typer

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.cli.lists import one_of
from vitlens.cli.options import Data, Images, Model
from vitlens.cli.terminal import say
from vitlens.names import DEFAULT_ALPHA, FUSIONS, Readout
from vitlens.runs.options import ModelOptions, RunOptions


def rollout(
    model: Model,
    *,
    images: Images = None,
    data: Data = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="LIST",
            help=f"Comma-separated: {', '.join(ATTENTION_METHODS)}.",
            show_default="rollout and, of a model with a classifier, relevance",
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option("--target", metavar="CLASS", help="Of gradients: predicted, true, or a class (name or index)."),
    ] = "predicted",
    fusion: Annotated[
        str, typer.Option("--fusion", metavar="LIST", help="How heads become one in rollout: mean, max, min.")
    ] = "mean,max,min",
    discard: Annotated[
        float, typer.Option("--discard", min=0, max=0.99, help="Fraction of the lowest weights to drop (rollout).")
    ] = 0.0,
    alpha: Annotated[
        float, typer.Option("--alpha", min=0, max=1, help="Share of the identity (the residual connection).")
    ] = DEFAULT_ALPHA,
    start_layer: Annotated[
        int, typer.Option("--start-layer", metavar="N", min=0, help="First layer of the product, from 0.")
    ] = 0,
    layer: Annotated[
        int | None,
        typer.Option("--layer", metavar="N", min=0, help="Of method attention, from 0 (default: the last)."),
    ] = None,
    readout: Annotated[
        Readout | None, typer.Option("--readout", help="Row to read (default: what the model's classifier reads).")
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Attention followed to the image: rollout (Abnar & Zuidema 2020), relevance (Chefer 2021) and their kin."""
    methods = () if method is None else one_of("--method", method, tuple(ATTENTION_METHODS))
    fusions = one_of("--fusion", fusion, FUSIONS)  # a wrong word is said before torch is imported
    from vitlens.runs.rollout import rollout as run

    written = run(
        model,
        images=images,
        data=data,
        method=methods,
        target=target,
        fusion=fusions,
        discard=discard,
        alpha=alpha,
        start_layer=start_layer,
        layer=layer,
        readout=readout,
        model_options=model_options,
        options=options,
    )
    if written is not None:  # of several processes the first alone has something to say
        say(written)
