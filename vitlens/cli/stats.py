"""`vitlens stats`: how every head looks."""

from typing import Annotated

import typer

from vitlens.cli.options import Data, Images, Models, Predicted
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.names import AnimationFormat


def stats(
    models: Models,
    *,
    data: Data = None,
    images: Images = None,
    predicted: Predicted = False,
    renormalise: Annotated[
        bool,
        typer.Option(
            "--renormalise/--no-renormalise",
            help="Distance of the attention on patches alone, or with the mass on CLS counted as 0 px.",
        ),
    ] = True,
    over_training: Annotated[
        bool,
        typer.Option("--over-training", help="Also with the weights that a run with --keep-every kept."),
    ] = False,
    animate: Annotated[
        AnimationFormat | None,
        typer.Option("--animate", help="And as a film, in animations/; mp4 needs ffmpeg.", show_default=False),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Distance, entropy, sparsity, sinks and speciality of every head; two models are compared head by head."""
    from vitlens.runs.stats import stats as run

    written = run(
        models,
        data=data,
        images=images,
        predicted=predicted,
        renormalise=renormalise,
        learning=over_training,
        animate=animate,
        model_options=model_options,
        options=options,
    )
    if written is not None:  # of several processes the first alone has something to say
        say(written)
