"""The options of `vitlens train` that make two bundles: fine-tuning and distillation."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.completion import complete_model
from vitlens.names import DistillKind
from vitlens.runs.train_options import Teaching, Tuning

TUNING, _TEACHING = "Fine-tuning (of a trained MODEL)", "Distillation"


def tuning_options(
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights", metavar="FILE", help="Weights to start from.", rich_help_panel=TUNING, show_default=False
        ),
    ] = None,
    freeze_backbone: Annotated[
        bool,
        typer.Option("--freeze-backbone", help="The head alone, on features computed once.", rich_help_panel=TUNING),
    ] = False,
    cached_views: Annotated[
        int | None,
        typer.Option(
            "--cached-views",
            metavar="N",
            help="Augmented views of each image in the cache (default: the image as it is).",
            rich_help_panel=TUNING,
            show_default=False,
        ),
    ] = None,
    train_last: Annotated[
        int | None,
        typer.Option(
            "--train-last",
            metavar="K",
            help="The last K blocks and the head.",
            rich_help_panel=TUNING,
            show_default=False,
        ),
    ] = None,
    compare_frozen: Annotated[
        bool,
        typer.Option(
            "--compare-frozen",
            help="Train the head alone, then everything; one report of both.",
            rich_help_panel=TUNING,
        ),
    ] = False,
) -> Tuning:
    """What of a trained model is trained further."""
    return Tuning(None if weights is None else str(weights), freeze_backbone, train_last, cached_views, compare_frozen)


def teaching_options(
    distill_from: Annotated[
        str | None,
        typer.Option(
            "--distill-from",
            metavar="MODEL",
            help="A trained model that teaches it.",
            autocompletion=complete_model,
            rich_help_panel=_TEACHING,
            show_default=False,
        ),
    ] = None,
    distill: Annotated[
        DistillKind | None,
        typer.Option("--distill", help="What it learns of the teacher (default: hard).", rich_help_panel=_TEACHING),
    ] = None,
    distill_weight: Annotated[
        float | None,
        typer.Option(
            "--distill-weight",
            metavar="X",
            help="The teacher's share of the loss (default: hard 0.5, soft 0.1).",
            rich_help_panel=_TEACHING,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="X", help="Of soft (default: 3).", rich_help_panel=_TEACHING, show_default=False
        ),
    ] = None,
    distill_token: Annotated[
        bool | None,
        typer.Option(
            "--distill-token/--no-distill-token",
            help="A token and head of its own for the teacher (default: our ViTs).",
            rich_help_panel=_TEACHING,
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="MODEL",
            help="The same student trained plainly, to compare with.",
            autocompletion=complete_model,
            rich_help_panel=_TEACHING,
            show_default=False,
        ),
    ] = None,
) -> Teaching:
    """Who teaches a student, and how."""
    return Teaching(distill_from, distill, distill_weight, temperature, distill_token, beside)
