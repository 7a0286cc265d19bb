"""`vitlens attack`: how models break."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.attacks.defaults import COMMAND_ATTACKS, EPSILONS_255, EPSILONS_L2, RESTARTS
from vitlens.attacks.registry import ATTACKS
from vitlens.cli.options import Data, Images, Models, Predicted
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import amounts, count_or_counts, one_of
from vitlens.runs.attack_choices import AttackChoices, listed, require_sensible

_MORE = "Beside the curves"
_PATCH = "The patch attack"


def attack(
    models: Models,
    *,
    data: Data = None,
    images: Images = None,
    attacks: Annotated[
        str, typer.Option("--attack", metavar="LIST", help=f"Comma-separated: {', '.join(ATTACKS)}.")
    ] = ",".join(COMMAND_ATTACKS),
    epsilon: Annotated[
        str, typer.Option("--epsilon", metavar="LIST", help="Of L∞ attacks, in 1/255; 0: the clean accuracy.")
    ] = listed(EPSILONS_255),
    epsilon_l2: Annotated[
        str, typer.Option("--epsilon-l2", metavar="LIST", help="Of L2 attacks, distances in pixel units.")
    ] = listed(EPSILONS_L2),
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="N",
            help="Of attacks with steps; of some alone: pgd=20,cw=50.",
            show_default="each attack's own",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", help="Of attacks with a random start.")
    ] = RESTARTS,
    downwards: Annotated[
        bool,
        typer.Option(
            "--downwards", help="Try the largest epsilon first, down to where an image stands: quicker, less strict."
        ),
    ] = False,
    predicted: Predicted = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="FOLDER", help="Go on with a run that was stopped.")
    ] = None,
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer/--no-transfer", help="Show each model the images made for the others.", rich_help_panel=_MORE
        ),
    ] = True,
    inside: Annotated[
        bool,
        typer.Option("--inside/--no-inside", help="Maps, attention and paths before and after.", rich_help_panel=_MORE),
    ] = True,
    corruptions: Annotated[
        bool,
        typer.Option("--corruptions/--no-corruptions", help="Also everyday damage.", rich_help_panel=_MORE),
    ] = True,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="ALIAS",
            help="Model that mean corruption errors are relative to.",
            show_default="the first CNN",
            rich_help_panel=_MORE,
        ),
    ] = None,
    patch_side: Annotated[
        int | None,
        typer.Option(
            "--patch-side",
            metavar="PX",
            help="Side of the patch attack's square.",
            show_default="a quarter of the shorter side",
            rich_help_panel=_PATCH,
        ),
    ] = None,
    patch_anywhere: Annotated[
        bool,
        typer.Option("--patch-anywhere", help="The square need not lie on a ViT's tokens.", rich_help_panel=_PATCH),
    ] = False,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Accuracy under attack over epsilon, for one model or several; what changes inside; self-checked, resumable."""
    choices = AttackChoices(
        attacks=one_of("--attack", attacks, tuple(ATTACKS)),
        epsilons=amounts("--epsilon", epsilon),
        epsilons_l2=amounts("--epsilon-l2", epsilon_l2),
        steps=count_or_counts("--steps", steps),
        restarts=restarts,
        corruptions=corruptions,
        transfer=transfer,
        inside=inside,
        predicted=predicted,
        baseline=baseline,
        patch_side=patch_side,
        patch_anywhere=patch_anywhere,
        downwards=downwards,
    )
    require_sensible(choices)
    from vitlens.runs.attack import attack as run

    written = run(
        models,
        data=data,
        images=images,
        choices=choices,
        resume=resume,
        model_options=model_options,
        options=options,
    )
    if written is not None:  # of several processes the first alone has something to say
        say(written)
