"""Figures, report.md and report.html from a run's folder alone: at each command's end, and by
`vitlens report`.
"""

import csv
import errno
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.deadline import require_time
from vitlens.commands.run.folder import RunFolder, require_plain
from vitlens.commands.run.progress import phase
from vitlens.errors import InputError, RunError, StorageError, UnknownNameError
from vitlens.files import inside, named_file, write_atomically, write_text
from vitlens.names import FigureFormat
from vitlens.record import Record, RunRecord, read_run
from vitlens.record_files import flat, read_record
from vitlens.report.claims import verdict_rows
from vitlens.report.document import Document, FigureSpec
from vitlens.report.markdown import figures_shown, markdown, portfolio_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.md"
PAGE = "report.html"
PORTFOLIO = "portfolio.md"
PORTFOLIO_PAGE = "portfolio.html"
_DOTS_PER_INCH = 200
# the same run draws the same bytes
_UNDATED: Final = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def publish(folder: RunFolder, *, final: bool = True) -> Path:
    """Draw the figures of a run that ends now and write its report, from what lies in its folder
    alone.

    Returns the path of report.md, or of report.html where the run's options ask for it. To be
    called last within the folder's block. final: False for a report that says that the run goes on;
    the one at the end shows the same figures.
    """
    with phase("Writing the report"):
        record = read(folder.record())
        document = COMMANDS[record.command].report(record)
        folder.verdicts = verdict_rows(document.claims)
        save_figures(document, record, copy=True, skip=folder.figures)
        folder.figures = tuple(figure.name for figure in document.figures)
        run = record.config.options.get("run")
        html_option = run.get("html") if isinstance(run, Mapping) else None
        html = COMMANDS[record.command].html if html_option is None else bool(html_option)
        if final:
            record = replace(record, status="done", seconds=folder.stop())
        return _write(document, record, html=html)


def report(path: Path, *, html: bool = False) -> Path:
    """Draw the figures of an earlier run and write its report.md again; returns the report's path.

    html: write report.html, too, and return its path; this is also done where the folder holds one,
    which would otherwise say something else than report.md. Figures that the earlier report.md
    showed and this one does not are removed from figures/.

    Raises InputError when the folder is no run, holds links, or contents that no report can be made
    of; UnknownNameError when its command leaves no report.
    """
    with phase("Reading the folder"):
        record = read_folder(path)
    with phase("Writing the report"), foreign_contents(record):
        document = COMMANDS[record.command].report(record)
        save_figures(document, record)
        page = html or inside(path, PAGE).is_file()
        before = figures_in(inside(path, REPORT))
        written = _write(document, record, html=page)
        _remove_old_figures(path, before, keep={figure.name for figure in document.figures})
        return written


def write_portfolio(path: Path, *, html: bool = False) -> Path:
    """Draw the figures of a finished study and write its portfolio report; returns the path.

    html: also write portfolio.html, and return its path. Raises InputError for another run.
    """
    record = read_folder(path)
    command = COMMANDS[record.command]
    if not command.portfolio or type(record) is not command.records[0]:
        raise InputError(
            f"expected a whole study with --portfolio, found {record.command} in {path}; run "
            "vitlens study --portfolio"
        )
    if record.status != "done":
        raise InputError(
            f"expected a finished study with --portfolio, found status {record.status} in {path}; "
            "run it again"
        )
    with phase("Writing the portfolio report"), foreign_contents(record):
        document = command.portfolio_report(record)
        save_figures(document, record, copy=True)
        written = inside(path, PORTFOLIO)
        write_text(written, portfolio_markdown(document))
        if html:
            from vitlens.report.html import portfolio_page

            written = inside(path, PORTFOLIO_PAGE)
            write_text(written, portfolio_page(document, record))
    return written


def write_report(path: Path) -> None:
    """Write report.md and the tables of a finished run again; its figures stay.

    Raises InputError as `report`.
    """
    record = read_folder(path)
    with foreign_contents(record):
        _write(COMMANDS[record.command].report(record), record, html=False)


def read(run: RunRecord) -> Any:
    """Return the record of a run, of the class that its command declares for its options.

    Names in it are as they were written, and escaped where they are put into a report.
    """
    return read_record(COMMANDS[run.command].record_class(run.options), run)


def read_folder(path: Path) -> Any:
    """Return the record of an earlier run's folder.

    Raises InputError and UnknownNameError as `report`.
    """
    run = read_run(path)
    reporting = [word for word, command in COMMANDS.items() if command.reports]
    if run.command not in reporting:
        raise UnknownNameError("report of the command", run.command, reporting)
    require_plain(path)
    with foreign_contents(run):
        return read(run)


def save_figures(
    document: Document, record: Record, *, copy: bool = False, skip: Collection[str] = ()
) -> None:
    """Save every figure, one at a time, as png and in the run's other formats.

    skip: names of figures that this run has saved already.
    copy: copy the figures that chapters of this run have drawn, where they are there, rather than
        draw them again.
    """
    formats = tuple(dict.fromkeys(["png", *record.config.formats]))
    figures = [spec for spec in document.figures if spec.name not in skip]
    for number, spec in enumerate(figures, start=1):
        require_time()
        with phase(f"Drawing figure {number} of {len(figures)}"):
            _save_figure(spec, record, formats, copy=copy)


def _save_figure(spec: FigureSpec, record: Record, formats: tuple[str, ...], *, copy: bool) -> None:
    """Save one figure, or copy the one that a chapter has drawn."""
    from vitlens.charts.style import of_width

    files = _files(record.folder, "figures", spec.name, formats)
    chapter, name = spec.chapter
    drawn = _files(record.folder, f"{chapter}/figures", name, formats) if copy and chapter else ()
    if not drawn or not all(path.is_file() for path in drawn):
        with of_width(record.config.width):
            figure = spec.draw()
        _save(figure, dict(zip(formats, files, strict=True)))
        return
    for path, source in zip(files, drawn, strict=True):
        with write_atomically(path) as temporary:
            shutil.copyfile(source, temporary)


def _files(folder: Path, below: str, name: str, formats: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(inside(folder, below, named_file(name, f".{form}")) for form in formats)


def _save(figure: "Figure", files: Mapping[str, Path]) -> None:
    from matplotlib import rc_context

    from vitlens.report.html.pictures import CHART

    images = [image for axes in figure.axes for image in axes.images]
    for form, path in files.items():
        about = {"Description": CHART} if form == "png" and not images else _UNDATED.get(form, {})
        # without a salt, the ids inside an svg are drawn at random
        with write_atomically(path) as temporary, rc_context({"svg.hashsalt": "vitlens"}):
            figure.savefig(temporary, format=form, dpi=_DOTS_PER_INCH, metadata=about)


def _write_tables(record: Record) -> None:
    """Write every table as tables/NAME.csv, an interval as three columns."""
    for name, rows in record.tables.items():
        if rows:
            text = StringIO()
            cells = [flat(row) for row in rows]
            columns = dict.fromkeys(key for row_cells in cells for key in row_cells)
            writer = csv.DictWriter(text, list(columns))
            writer.writeheader()
            writer.writerows(cells)
            # names of files may hold lone bytes
            content = text.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")
            write_text(inside(record.folder, "tables", named_file(name, ".csv")), content)


def _write(document: Document, record: Record, *, html: bool) -> Path:
    """Write report.md and, with html, report.html; the path of the last."""
    _write_tables(record)
    path = inside(record.folder, REPORT)
    write_text(path, markdown(document, record))
    if not html:
        return path
    from vitlens.report.html import page

    path = inside(record.folder, PAGE)
    write_text(path, page(document, record))
    return path


@contextmanager
def foreign_contents(run: RunRecord | Record) -> Iterator[None]:
    """Report an error inside as a fault of the folder's contents, which anyone may have written."""
    try:
        yield
    except (InputError, StorageError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        if isinstance(run, Record) and run.missing_tables:
            reason = f"without {', '.join(run.missing_tables)}: {reason}"
        reason = " ".join(reason.split())[:200]
        raise InputError(
            f"expected what vitlens {run.command} writes in {run.folder}, found contents of which "
            f"no report can be made ({reason}); run the command again"
        ) from error


_SIGNATURE: Final = b"Matplotlib"  # in the metadata of each of them


def figures_in(report: Path) -> tuple[str, ...]:
    """Return the names of the figures in an earlier report.md; none where there is no such file."""
    return (
        figures_shown(report.read_text(encoding="utf-8", errors="replace"))
        if report.is_file()
        else ()
    )


def _remove_old_figures(
    folder: Path, shown_before: Iterable[str], *, keep: Collection[str]
) -> None:
    """Remove the files of figures that were shown before and are not among those to keep, from a
    run's figures/.

    shown_before: names, from shown_in before the report was written again.
    keep: names of the figures drawn now.

    A link, a file in another format and a file without matplotlib's signature stay.
    """
    old = {
        f"{name}.{form}"
        for name in shown_before
        if name not in keep
        for form in get_args(FigureFormat)
    }
    for path in sorted((folder / "figures").glob("*")):
        if (
            path.name in old
            and path.is_file()
            and not path.is_symlink()
            and _SIGNATURE in path.read_bytes()
        ):
            path.unlink()
