"""`vitlens explain`: what of each image speaks for a class, by any method of the registry."""

from typing import Annotated

import typer

from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.cli.options import Data, Images, Models
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import names_of, one_of
from vitlens.names import Engine, Substrate


def explain(
    models: Models,
    *,
    images: Images = None,
    data: Data = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="LIST",
            help=f"Comma-separated, or all: {', '.join(ATTRIBUTIONS)}.",
            show_default=f"{', '.join(default_methods())}, as far as a model has them",
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(
            "--engine",
            help="grad-cam: the package's own maps (ReLU, scaled to [0, 1]), of the methods that it has.",
        ),
    ] = "vitlens",
    target: Annotated[
        str,
        typer.Option("--target", metavar="CLASS", help="Explained: predicted, true, or a class (name or index)."),
    ] = "predicted",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check every method: patches removed, weights randomised, localisation; a league table.",
        ),
    ] = False,
    substrate: Annotated[
        Substrate,
        typer.Option("--substrate", help="With --verify: what stands where a patch is removed."),
    ] = "blur",
    counterfactuals: Annotated[
        bool,
        typer.Option(
            "--counterfactuals/--no-counterfactuals",
            help="With --verify: look for sets of patches that turn the prediction (the costliest check).",
        ),
    ] = True,
    show: Annotated[
        str | None,
        typer.Option(
            "--show", metavar="LIST", help="Draw these images, by file name (default: the first).", show_default=False
        ),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """What of each image speaks for a class: GradCAM and its kin, attention, gradients, occlusion, RISE, KernelSHAP."""
    methods = () if method is None else one_of("--method", method, (*ATTRIBUTIONS, "all"))
    from vitlens.runs.explain import explain as run

    say(
        run(
            models,
            images=images,
            data=data,
            method=methods,
            engine=engine,
            target=target,
            verify=verify,
            substrate=substrate,
            counterfactuals=counterfactuals,
            show=() if show is None else names_of("--show", show),
            model_options=model_options,
            options=options,
        )
    )
