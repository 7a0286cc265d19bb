"""`vitlens report`: write a report again."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.terminal import say


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A report folder.", show_default=False)],
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    """Write report.md and the figures again from results.json and arrays/."""
    from vitlens.runs.report import report as run

    say(run(folder))
