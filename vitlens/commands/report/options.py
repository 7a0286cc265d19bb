"""The options of `vitlens report`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument, option


@dataclass(frozen=True)
class ReportOptions:
    """The folder of an earlier run, and what to write.

    An HTML page that is there already is always written again.
    """

    folder: Path = argument("FOLDER", "A report folder.")
    html: bool = option(
        "--html",
        "Also write report.html (with --compare: comparison.html), one self-contained file to "
        "share.",
        default=False,
    )
    portfolio: bool = option(
        "--portfolio",
        "Write portfolio.md, the longer report of a whole study (with --html also portfolio.html).",
        default=False,
    )
    compare: Path | None = option(
        "--compare",
        "Write comparison.md: what changed significantly since this earlier folder of the same "
        "command. All rows are in comparison/*.csv. Exit code 3 if a metric got worse.",
        metavar="BEFORE",
    )
    share: Path | None = option(
        "--share",
        "Write a copy to this new folder, to share: without weights, absolute paths cut to their "
        "last two parts.",
        metavar="NEW",
    )
