"""The options of `vitlens report`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument, option


@dataclass(frozen=True)
class ReportOptions:
    """folder: of an earlier run; html: whether report.html (or comparison.html) is written, too, as it is where there
    is one already; compare: the folder of a run of the same command before it; share: a new folder for a copy to send
    on."""

    folder: Path = argument("FOLDER", "A report folder.")
    html: bool = option(
        "--html", "Also write report.html (with --compare: comparison.html), one file to send on.", default=False
    )
    compare: Path | None = option(
        "--compare",
        "Write what changed beyond chance since this folder of the same command, as comparison.md; exit code 3 where "
        "a metric got worse.",
        metavar="BEFORE",
    )
    share: Path | None = option(
        "--share",
        "Write a copy to send on to this new folder: without weights, absolute paths cut to their last two parts.",
        metavar="NEW",
    )
