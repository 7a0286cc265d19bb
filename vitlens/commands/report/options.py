"""The options of `vitlens report`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.scaffold.flags import argument


@dataclass(frozen=True)
class ReportOptions:
    """folder: of an earlier run."""

    folder: Path = argument("FOLDER", "A report folder.")
