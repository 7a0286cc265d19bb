"""`vitlens ablate`: which heads matter."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.options import Data, Images, Model, Predicted
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import one_of
from vitlens.errors import InputError
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, UNIT_KINDS
from vitlens.runs.ablate_choices import AblateChoices

_MORE, _PRUNE = "Beyond importance", "Pruning"


def ablate(
    model: Model,
    *,
    data: Data = None,
    images: Images = None,
    predicted: Predicted = False,
    replace: Annotated[
        str | None,
        typer.Option(
            "--replace",
            metavar="LIST",
            help=f"What stands in a head's place: {', '.join(REPLACEMENTS)}.",
            show_default=f"mean; resample below {FEWEST_FOR_MEAN} images, zero for one",
        ),
    ] = None,
    units: Annotated[
        str, typer.Option("--units", metavar="LIST", help=f"What is removed: {', '.join(UNIT_KINDS)}.")
    ] = ",".join(UNIT_KINDS),
    top: Annotated[
        int | None,
        typer.Option(
            "--top", metavar="K", min=1, help="Only find the K most important heads, at a fraction of the cost."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="FOLDER", help="Go on with a run that was stopped.")
    ] = None,
    curves: Annotated[
        bool, typer.Option("--curves/--no-curves", help="Remove heads one after another.", rich_help_panel=_MORE)
    ] = True,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Also rank again after each removal.", rich_help_panel=_MORE)
    ] = False,
    pairs: Annotated[
        int,
        typer.Option(
            "--pairs", metavar="K", min=0, help="Remove the K top heads two by two; 0: not.", rich_help_panel=_MORE
        ),
    ] = 5,
    patch: Annotated[
        bool,
        typer.Option(
            "--patch/--no-patch", help="Activation patching, logit lens, contributions.", rich_help_panel=_MORE
        ),
    ] = True,
    clean: Annotated[
        Path | None, typer.Option("--clean", metavar="PATH", help="Image to patch from.", rich_help_panel=_MORE)
    ] = None,
    corrupted: Annotated[
        Path | None, typer.Option("--corrupted", metavar="PATH", help="Image to patch into.", rich_help_panel=_MORE)
    ] = None,
    prune: Annotated[
        float | None,
        typer.Option("--prune", metavar="X", min=0, max=1, help="Cut this share of the heads.", rich_help_panel=_PRUNE),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Where the pruned model goes (a MODEL).", rich_help_panel=_PRUNE),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """How much the model loses without each head, MLP and block: exact, with intervals, by replaying what changes."""
    if (clean is None) != (corrupted is None):
        raise InputError("expected --clean and --corrupted together, found one of them; give both images, or none")
    if save is not None and prune is None:
        raise InputError("expected --save with --prune X, found no --prune; e.g. --prune 0.25 --save pruned")
    choices = AblateChoices(
        replace=() if replace is None else one_of("--replace", replace, REPLACEMENTS),
        predicted=predicted,
        units=one_of("--units", units, UNIT_KINDS),
        curves=curves,
        greedy=greedy,
        pairs=pairs,
        top=top,
        patch=patch,
        clean=clean,
        corrupted=corrupted,
        prune=prune,
        save=save,
    )
    from vitlens.runs.ablate import ablate as run

    written = run(
        model,
        data=data,
        images=images,
        choices=choices,
        resume=resume,
        model_options=model_options,
        options=options,
    )
    if written is not None:  # of several processes the first alone has something to say
        say(written)
