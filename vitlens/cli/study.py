"""`vitlens study`: the whole thing, in one report."""

from typing import Annotated

import typer

from vitlens.cli.completion import complete_model
from vitlens.cli.options import Data
from vitlens.runs.options import ModelOptions, RunOptions


def study(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="A ViT and a CNN; a preset is trained first. None: vit-micro and resnet20 on digits.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    *,
    data: Data = None,
    epochs: Annotated[int | None, typer.Option("--epochs", metavar="N", min=1, help="Of what is trained.")] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Train a ViT and a CNN (or take yours), evaluate both, look inside, and write one report."""
    from vitlens.runs.study import study as run

    typer.echo(run(models or (), data=data or "digits", epochs=epochs, model_options=model_options, options=options))
