"""`vitlens attention`: where every head looks."""

from typing import Annotated

import typer

from vitlens.cli.options import Data, Images, Model
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import two_counts

_VIEWS = "Views (layers, heads, rows and columns from 0)"


def attention(
    model: Model,
    *,
    images: Images = None,
    data: Data = None,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            metavar="N",
            help="Layer whose heads are drawn large (default: the last).",
            show_default=False,
            rich_help_panel=_VIEWS,
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            metavar="ROW,COL",
            help="Where this patch looks, layer by layer.",
            show_default=False,
            rich_help_panel=_VIEWS,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="ROW,COL",
            help="Who looks at this patch, layer by layer.",
            show_default=False,
            rich_help_panel=_VIEWS,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="LAYER,HEAD",
            help="One head over the training of a run with --keep-every; --query and --key show its number too.",
            show_default=False,
            rich_help_panel=_VIEWS,
        ),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """Attention maps by layer and head, their evolution over the layers, and the position embeddings."""
    looking = None if query is None else two_counts("--query", query, "ROW,COL")
    looked_at = None if key is None else two_counts("--key", key, "ROW,COL")
    one = None if head is None else two_counts("--head", head, "LAYER,HEAD")
    from vitlens.runs.attention import attention as run

    written = run(
        model,
        images=images,
        data=data,
        layer=layer,
        query=looking,
        key=looked_at,
        head=one,
        model_options=model_options,
        options=options,
    )
    say(written)
