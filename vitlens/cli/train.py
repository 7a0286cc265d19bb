"""`vitlens train`: from scratch, from trained weights, from a teacher."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.completion import complete_model
from vitlens.cli.lists import one_of, recipe_settings, side_lengths
from vitlens.cli.options import Data
from vitlens.cli.train_options import TUNING
from vitlens.names import TRACKERS, Compile, RecipeName
from vitlens.runs.options import RunOptions
from vitlens.runs.train_options import Teaching, Tuning

_RECIPE, _SHAPE = "Recipe (default: the preset's)", "Shape (default: the preset's)"
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
    named: Annotated[
        RecipeName | None,
        typer.Option("--recipe", help="One that serves any model.", rich_help_panel=_RECIPE, show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other number of the recipe: mixup=0.8, optimiser=adamw, accumulate=4 ...; may be repeated.",
            rich_help_panel=_RECIPE,
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", metavar="N", help="Passes over the data.", rich_help_panel=_RECIPE)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", metavar="X", help="Its peak.", rich_help_panel=_RECIPE)
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", metavar="X", help="AdamW's.", rich_help_panel=_RECIPE)
    ] = None,
    warmup: Annotated[
        float | None, typer.Option("--warmup", metavar="X", help="Share of the steps.", rich_help_panel=_RECIPE)
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option("--clip", metavar="X", help="Largest gradient norm, 0: any.", rich_help_panel=_RECIPE),
    ] = None,
    label_smoothing: Annotated[
        float | None, typer.Option("--label-smoothing", metavar="X", help="Share in [0, 1).", rich_help_panel=_RECIPE)
    ] = None,
    layer_decay: Annotated[
        float | None,
        typer.Option(
            "--layer-decay",
            metavar="X",
            help="Share of the learning rate that a layer has of the one above it.",
            rich_help_panel=TUNING,
        ),
    ] = None,
    average: Annotated[
        float | None,
        typer.Option("--average", metavar="X", help="Decay of averaged weights, 0: none.", rich_help_panel=_RECIPE),
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
    image_size: Annotated[
        str | None, typer.Option("--image-size", metavar="N|HxW", help="Input size in pixels.", rich_help_panel=_SHAPE)
    ] = None,
    patch_size: Annotated[
        str | None, typer.Option("--patch-size", metavar="N|HxW", help="In pixels; a ViT's.", rich_help_panel=_SHAPE)
    ] = None,
    dim: Annotated[
        int | None, typer.Option("--dim", metavar="N", help="Width of a ViT's tokens.", rich_help_panel=_SHAPE)
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", metavar="N", help="A ViT's blocks.", rich_help_panel=_SHAPE)
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", metavar="N", help="A ViT's heads in a block.", rich_help_panel=_SHAPE)
    ] = None,
    compiling: Annotated[
        Compile, typer.Option("--compile", help="torch.compile; auto: where it pays.", rich_help_panel=_COST)
    ] = "auto",
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Blocks' activations twice, to spare memory.", rich_help_panel=_COST),
    ] = False,
    tuning: Tuning,
    teaching: Teaching,
    options: RunOptions,
) -> None:
    """Train a preset from scratch, or a trained model further; its folder is a MODEL for every other command."""
    recipe: dict[str, object] = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "warmup": warmup,
        "clip": clip,
        "label_smoothing": label_smoothing,
        "layer_decay": layer_decay,
        "average": average,
    }
    recipe |= recipe_settings(settings or [])
    patches = None if patch_size is None else list(side_lengths("--patch-size", patch_size))
    shape = {"patch_size": patches, "dim": dim, "depth": depth, "heads": heads}
    size = None if image_size is None else side_lengths("--image-size", image_size)
    from vitlens.runs.train import train as run

    written = run(
        model,
        data=data,
        resume=resume,
        recipe={name: value for name, value in recipe.items() if value is not None},
        shape={name: value for name, value in shape.items() if value is not None},
        image_size=size,
        keep_every=keep_every,
        track=() if track is None else one_of("--track", track, TRACKERS),
        named=named,
        compiling=None if compiling == "auto" else compiling,
        recompute=recompute,
        tuning=tuning,
        teaching=teaching,
        options=options,
    )
    if written is not None:  # of several processes the first alone has something to say
        typer.echo(written)
