"""`vitlens train`: from scratch, from trained weights, from a teacher."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.completion import complete_model
from vitlens.cli.options import Data
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.parsing import one_of
from vitlens.names import TRACKERS, Compile
from vitlens.runs.train_options import Changes, Shape, Teaching, Tuning

_COST = "Speed and memory"


def train(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="From scratch: vit-micro, vit-tiny, resnet20 ... Further: timm:NAME, torchvision:NAME, a run folder; "
            "see vitlens models. Left out with --resume.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    *,
    data: Data = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FOLDER", help="Go on with a run that was stopped, as it was begun."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            metavar="N",
            min=1,
            help="Keep the weights of every N epochs; see vitlens attention --head, vitlens stats --over-training.",
            show_default=False,
        ),
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(
            "--track",
            metavar="LIST",
            help="Tell trackers how it goes: tensorboard, wandb (offline where no account is known).",
            show_default=False,
        ),
    ] = None,
    compiling: Annotated[
        Compile, typer.Option("--compile", help="torch.compile; auto: where it pays.", rich_help_panel=_COST)
    ] = "auto",
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Blocks' activations twice, to spare memory.", rich_help_panel=_COST),
    ] = False,
    changes: Changes,
    tuning: Tuning,
    shape: Shape,
    teaching: Teaching,
    options: RunOptions,
) -> None:
    """Train a preset from scratch, or a trained model further; its folder is a MODEL for every other command."""
    from vitlens.runs.train import train as run

    written = run(
        model,
        data=data,
        resume=resume,
        recipe=changes.numbers,
        shape=shape.sides,
        image_size=shape.image_size,
        keep_every=keep_every,
        track=() if track is None else one_of("--track", track, TRACKERS),
        named=changes.named,
        compiling=None if compiling == "auto" else compiling,
        recompute=recompute,
        tuning=tuning,
        teaching=teaching,
        options=options,
    )
    if written is not None:  # of several processes the first alone has something to say
        say(written)
