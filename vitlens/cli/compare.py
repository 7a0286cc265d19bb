"""`vitlens compare`: two models side by side."""

from typing import Annotated

import typer

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.options import Data, Models
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import one_of


def compare(
    models: Models,
    *,
    data: Data = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="A,B",
            help="Of the maps: one for both models, or one each (default: relevance for a ViT, gradcam for a CNN).",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option("--target", metavar="CLASS", help="Of the maps: predicted, true, or a class (name or index)."),
    ] = "predicted",
    panels: Annotated[int, typer.Option("--panels", metavar="N", min=1, help="Images shown side by side.")] = 50,
    maps: Annotated[
        int, typer.Option("--maps", metavar="N", min=1, help="Images whose maps the numbers are made of, at most.")
    ] = 500,
    harder: Annotated[
        bool,
        typer.Option("--harder/--no-harder", help="Also on filtered, shuffled and covered images."),
    ] = True,
    cue_conflict: Annotated[
        str | None,
        typer.Option(
            "--cue-conflict",
            metavar="DATA",
            help="Images named shapeN-textureM, for the shape bias (default: those of DATA, where it has some).",
            show_default=False,
        ),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Two models on the same images: maps side by side, errors taken apart, paired test, shape or texture."""
    methods = () if method is None else one_of("--method", method, tuple(ATTRIBUTIONS))
    from vitlens.runs.compare import compare as run

    written = run(
        models,
        data=data,
        method=methods,
        target=target,
        panels=panels,
        maps=maps,
        harder=harder,
        cue_conflict=cue_conflict,
        model_options=model_options,
        options=options,
    )
    say(written)
