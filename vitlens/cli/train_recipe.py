"""The options of `vitlens train` that make two more bundles: changes of the recipe, and of the model's shape."""

from typing import Annotated

import typer

from vitlens.cli.train_options import TUNING
from vitlens.commands.scaffold.parsing import recipe_settings, side_lengths
from vitlens.names import RecipeName
from vitlens.runs.train_options import Changes, Shape

_RECIPE, _SHAPE = "Recipe (default: the preset's)", "Shape (default: the preset's)"


def recipe_options(
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
) -> Changes:
    """What of the recipe is another than the preset's."""
    numbers: dict[str, object] = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "warmup": warmup,
        "clip": clip,
        "label_smoothing": label_smoothing,
        "layer_decay": layer_decay,
        "average": average,
    }
    numbers |= recipe_settings(settings or [])
    return Changes(named, {name: value for name, value in numbers.items() if value is not None})


def shape_options(
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
) -> Shape:
    """What of the model's shape is another than the preset's."""
    patches = None if patch_size is None else list(side_lengths("--patch-size", patch_size))
    shape: dict[str, int | list[int] | None] = {"patch_size": patches, "dim": dim, "depth": depth, "heads": heads}
    size = None if image_size is None else side_lengths("--image-size", image_size)
    return Shape(size, {name: value for name, value in shape.items() if value is not None})
