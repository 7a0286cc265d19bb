"""`vitlens study`: the whole thing, in one report, or one question about the architecture."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.completion import complete_kind, complete_model
from vitlens.cli.options import Data, Images, Predicted
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.errors import UnknownNameError
from vitlens.names import STUDY_KINDS

_KIND = "One question (--kind)"


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
    images: Images = None,
    predicted: Predicted = False,
    epochs: Annotated[int | None, typer.Option("--epochs", metavar="N", min=1, help="Of what is trained.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="WORD",
            help=f"{', '.join(STUDY_KINDS)}; all but whole train small models that differ in one thing.",
            autocompletion=complete_kind,
            rich_help_panel=_KIND,
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", metavar="N", min=1, help="Trainings of each point (default: 3).", rich_help_panel=_KIND
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FOLDER", help="Go on with a study of one --kind.", rich_help_panel=_KIND),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Train a ViT and a CNN (or take yours), evaluate both, look inside, write one report; or study one --kind."""
    if kind is not None and kind not in STUDY_KINDS:
        raise UnknownNameError("kind of study", kind, STUDY_KINDS, hint="vitlens study --help")
    from vitlens.runs.study import study as run

    written = run(
        models or (),
        kind=kind,
        data=data,
        images=images,
        predicted=predicted,
        epochs=epochs,
        seeds=seeds,
        resume=resume,
        model_options=model_options,
        options=options,
    )
    say(written)
