"""`vitlens models`: what can be loaded."""

from typing import Annotated

import typer

from vitlens.cli.terminal import say


def models(
    pattern: Annotated[
        str,
        typer.Argument(metavar="PATTERN", help="Part of a name, or a pattern such as 'deit3*'.", show_default=False),
    ] = "",
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    """What can be loaded, and which commands each supports."""
    from vitlens.runs.models import model_table

    for line in model_table(pattern):
        say(line)
