"""`vitlens stats`: how every head looks."""

from typing import Annotated

import typer

from vitlens.cli.options import Data, Images, Models
from vitlens.runs.options import ModelOptions, RunOptions


def stats(
    models: Models,
    *,
    data: Data = None,
    images: Images = None,
    renormalise: Annotated[
        bool,
        typer.Option(
            "--renormalise/--no-renormalise",
            help="Distance of the attention on patches alone, or with the mass on CLS counted as 0 px.",
        ),
    ] = True,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Distance, entropy, sparsity, sinks and speciality of every head; two models are compared head by head."""
    from vitlens.runs.stats import stats as run

    written = run(
        models, data=data, images=images, renormalise=renormalise, model_options=model_options, options=options
    )
    if written is not None:  # of several processes the first alone has something to say
        typer.echo(written)
