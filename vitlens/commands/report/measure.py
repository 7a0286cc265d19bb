"""The figures and report.md of an earlier run, or its comparison with another; torch is not imported."""

import shlex
from pathlib import Path

from vitlens.commands.report.comparison.changes import require_comparable
from vitlens.commands.report.comparison.document import ComparedRuns, document
from vitlens.commands.report.options import ReportOptions
from vitlens.commands.report.sharing import share
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.publish import PAGE, read_folder, report
from vitlens.errors import InputError
from vitlens.files import write_text
from vitlens.report.layout import laid_out
from vitlens.report.markdown import markdown
from vitlens.report.terminal import summary_lines
from vitlens.safe_paths import inside

COMPARISON = "comparison.md"
COMPARISON_PAGE = "comparison.html"


def measure(options: ReportOptions) -> Path | Conclusion:
    """Make them again; returns the report's path. Raises InputError for a folder that is no run's."""
    if options.compare is not None and options.share is not None:
        raise InputError("expected --compare or --share, found both; share a folder after it was compared")
    if options.compare is not None:
        return compared(options.compare, options.folder, html=options.html)
    if options.share is None:
        return report(options.folder, html=options.html)
    page = options.html or inside(options.folder, PAGE).is_file()
    return report(share(options.folder, options.share), html=page)


def compared(before: Path, after: Path, *, html: bool = False) -> Conclusion:
    """Write what changed from one run to another, into the folder of the later one.

    html: write comparison.html, too; this is also done where the folder holds one, as `report` does with its page.
    Raises InputError for folders that are no runs of one command, done, with as many models.
    """
    first, second = read_folder(before), read_folder(after)
    require_comparable(first, second)
    comparison = ComparedRuns.of(first, second)
    page_path = inside(second.folder, COMPARISON_PAGE)
    html = html or page_path.is_file()
    line = shlex.join(["vitlens", "report", "--compare", str(before), str(after), *(["--html"] if html else [])])
    written = laid_out(document(comparison, line))
    path = inside(second.folder, COMPARISON)
    write_text(path, markdown(written, second))
    if html:
        from vitlens.report.html import page

        path = page_path
        write_text(path, page(written, second, second.folder))
    return Conclusion(path, tuple(summary_lines(written)), holds=not comparison.worse)
