"""`vitlens data`: what can be fed to a model."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.completion import complete_data
from vitlens.cli.terminal import say


def data(
    name: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="Say more of one.", autocompletion=complete_data, show_default=False),
    ] = None,
    *,
    data_dir: Annotated[Path, typer.Option("--data-dir", metavar="DIR", help="Where downloaded data is kept.")] = Path(
        "data"
    ),
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    """What can be fed to a model; with a name, its parts, sizes and classes."""
    from vitlens.runs.data import data_table

    for line in data_table(name, data_dir=data_dir):
        say(line)
