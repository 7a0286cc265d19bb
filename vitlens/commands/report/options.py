"""The options of `vitlens report`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.scaffold.flags import argument, option


@dataclass(frozen=True)
class ReportOptions:
    """folder: of an earlier run; html: whether report.html is written, too, as it is where there is one already."""

    folder: Path = argument("FOLDER", "A report folder.")
    html: bool = option("--html", "Also write report.html, one file to send on.", default=False)
