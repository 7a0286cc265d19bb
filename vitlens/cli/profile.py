"""`vitlens profile`: what models cost."""

from typing import Annotated

import typer

from vitlens.cli.options import Models
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import counts, many_side_lengths
from vitlens.errors import InputError


def profile(
    models: Models,
    *,
    patch_size: Annotated[
        str | None,
        typer.Option(
            "--patch-size",
            metavar="LIST",
            help="Take ViT presets with each of these, in pixels; e.g. 4,8,16.",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar="LIST",
            help="Images (N or HxW) that vary the number of tokens (default: half to double).",
            show_default=False,
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            "--batch-sizes",
            metavar="LIST",
            help="Default: 1, 2, 4 ... until a pass takes more than a second.",
            show_default=False,
        ),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Parameters and FLOPs by part, memory, latency, throughput and growth with tokens; no weights needed."""
    if options.limit is not None:
        raise InputError(f"expected no --limit, found {options.limit}: profile takes random pixels; try --batch-sizes")
    patches = () if patch_size is None else many_side_lengths("--patch-size", patch_size)
    swept = () if sizes is None else many_side_lengths("--sizes", sizes)
    batches = () if batch_sizes is None else counts("--batch-sizes", batch_sizes)
    from vitlens.runs.profile import profile as run

    written = run(
        models,
        patch_sizes=patches,
        sizes=swept,
        batch_sizes=batches,
        model_options=model_options,
        options=options,
    )
    say(written)
