"""`vitlens train`: from scratch."""

from pathlib import Path
from typing import Annotated

import typer

from vitlens.cli.lists import side_lengths
from vitlens.cli.options import Data
from vitlens.names import PresetName
from vitlens.runs.options import RunOptions


def train(
    model: Annotated[PresetName, typer.Argument(metavar="PRESET", help="vit-micro ...", show_default=False)],
    *,
    data: Data = None,
    options: RunOptions,
) -> None:
    """Train a preset from scratch; the run folder it writes is a MODEL for every other command."""
    from vitlens.runs.train import train as run

    run(model, data=data or "digits", options=options)
