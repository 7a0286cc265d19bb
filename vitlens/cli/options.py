"""The options that commands share, one definition each, and the two bundles that runs take."""

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.completion import complete_data, complete_model
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import numbers, one_of, side_lengths
from vitlens.names import DEFAULT_SEED, FORMATS, Precision

COMMAND_LINE: ContextVar[str] = ContextVar("command_line", default="")  # as it was typed, for config.json

_MODEL_PANEL = "Your own weights"
_RUN_PANEL = "Run and report"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="vit-digits, timm:NAME, torchvision:NAME, open-clip:ARCH/TAG, a run folder or a weights file; "
        "see vitlens models.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="One or several, each as [alias=]NAME[@WEIGHTS]; see vitlens models.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="digits, cifar10 ..., a folder of class folders or of images, or an .npz; see vitlens data.",
        autocompletion=complete_data,
        show_default=False,
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        "--images", metavar="PATH...", help="Image files or folders of them, as many as you like.", show_default=False
    ),
]

Predicted = Annotated[
    bool, typer.Option("--predicted", help="Take what the model predicts for the label, of images without labels.")
]


def run_options(
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="At most N images, as many of each class.", rich_help_panel=_RUN_PANEL
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", metavar="N", min=1, help="Images at a time (default: fits).", rich_help_panel=_RUN_PANEL
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=_RUN_PANEL),
    ] = "auto",
    precision: Annotated[
        Precision, typer.Option("--precision", help="Number format of the arithmetic.", rich_help_panel=_RUN_PANEL)
    ] = "auto",
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Of everything random.", rich_help_panel=_RUN_PANEL)
    ] = DEFAULT_SEED,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder to write (default: a new one, named by time).",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --out where it exists.", rich_help_panel=_RUN_PANEL)
    ] = False,
    formats: Annotated[
        str,
        typer.Option(
            "--format", metavar="LIST", help="Figures as png, svg, pdf (comma-separated).", rich_help_panel=_RUN_PANEL
        ),
    ] = "png",
    data_dir: Annotated[
        Path,
        typer.Option("--data-dir", metavar="DIR", help="Where downloaded data is kept.", rich_help_panel=_RUN_PANEL),
    ] = Path("data"),
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Say nothing but errors and results.", rich_help_panel=_RUN_PANEL)
    ] = False,
    debug: Annotated[  # noqa: ARG001  the boundary in main.py reads it from the command line itself
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_RUN_PANEL)
    ] = False,
) -> RunOptions:
    """What every run is told: how much, where, with what seed, and where the report goes."""
    return RunOptions(
        device=device,
        precision=precision,
        seed=seed,
        batch_size=batch_size,
        limit=limit,
        out=out,
        overwrite=overwrite,
        quiet=quiet,
        formats=one_of("--format", formats, FORMATS),
        data_dir=data_dir,
        command=COMMAND_LINE.get(),
    )


def model_options(
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Weights for MODEL, from a file.", rich_help_panel=_MODEL_PANEL),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Untrained weights (a sanity check).", rich_help_panel=_MODEL_PANEL)
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="NAME",
            help="Architecture of a weights file: a preset, timm:NAME or torchvision:NAME.",
            autocompletion=complete_model,
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option("--image-size", metavar="N|HxW", help="Input size in pixels.", rich_help_panel=_MODEL_PANEL),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            "--mean", metavar="R,G,B", help="Mean it was trained with, in [0, 1].", rich_help_panel=_MODEL_PANEL
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option("--std", metavar="R,G,B", help="Spread it was trained with.", rich_help_panel=_MODEL_PANEL),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option("--classes", metavar="FILE", help="Class names, one a line.", rich_help_panel=_MODEL_PANEL),
    ] = None,
) -> ModelOptions:
    """What is said about weights that do not say it themselves."""
    return ModelOptions(
        weights=weights,
        random_weights=random_weights,
        arch=arch,
        image_size=None if image_size is None else side_lengths("--image-size", image_size),
        mean=None if mean is None else numbers("--mean", mean),
        std=None if std is None else numbers("--std", std),
        classes=classes,
    )
