"""Make figures, report.md and report.html from a run's folder only.

`publish` does so at the end of a command, `report` again for an earlier run (`vitlens report`), and
`write_portfolio` the portfolio report of a study. `read_folder` returns a folder's record.
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
from vitlens.commands.run.deadline import TooLongError, require_time
from vitlens.commands.run.folder import RunFolder, require_plain
from vitlens.commands.run.progress import phase
from vitlens.display import visible
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
# metadata without the time, so that the same run draws the same bytes
_UNDATED: Final[Mapping[str, dict[str, Any]]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
_SIGNATURE: Final = b"Matplotlib"  # in the metadata of each figure that matplotlib draws
_MOST_CHARACTERS: Final = 200  # of a reason in an error message


def publish(folder: RunFolder, *, final: bool = True) -> Path:
    """Draw the figures of a run and write its report, from what its folder holds.

    To be called last within the folder's block. Returns the path of report.md, or of report.html
    where the run's options ask for it.

    final: False for a report that says that the run goes on. `publish` is then called again at the
        end, and does not draw the same figures again.
    """
    with phase("Writing the report"):
        record = read(folder.record())
        document = COMMANDS[record.command].report(record)
        folder.verdicts = verdict_rows(document.claims)
        save_figures(document, record, copy=True, skip=folder.figures)
        folder.figures = tuple(figure.name for figure in document.figures)
        if final:
            record = replace(record, status="done", seconds=folder.stop())
        return _write(document, record, html=_wants_page(record))


def _wants_page(record: Record) -> bool:
    """Return True if --html was given, or is the default of the command."""
    run_options = record.config.options.get("run")
    html_option = None
    if isinstance(run_options, Mapping):
        html_option = run_options.get("html")
    if html_option is None:
        return COMMANDS[record.command].html
    return bool(html_option)


def report(path: Path, *, html: bool = False) -> Path:
    """Draw the figures of an earlier run and write its report.md again; return the report's path.

    Figures that the earlier report.md showed and this one does not are removed from figures/.

    html: True to write report.html, too, and return its path. If the folder has one, it is always
        written, as it would otherwise differ from report.md.

    Raises InputError when the folder is no run, holds links, or contents that no report can be made
    of; UnknownNameError when its command leaves no report.
    """
    with phase("Reading the folder"):
        record = read_folder(path)
    with phase("Writing the report"), foreign_contents(record):
        document = COMMANDS[record.command].report(record)
        save_figures(document, record)
        has_page = inside(path, PAGE).is_file()
        shown_before = figures_in(inside(path, REPORT))
        written = _write(document, record, html=html or has_page)
        _remove_old_figures(path, shown_before, keep={figure.name for figure in document.figures})
        return written


def write_portfolio(path: Path, *, html: bool = False) -> Path:
    """Draw the figures of a finished study and write its portfolio report; returns the path.

    html: True to write portfolio.html, too, and return its path.

    Raises InputError for another run.
    """
    record = read_folder(path)
    command = COMMANDS[record.command]
    is_whole_study = type(record) is command.records[0]  # the others are of kinds of a study
    if not command.portfolio or not is_whole_study:
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

    copy: True to copy figures that chapters of this run have drawn, where their files are there.
    skip: names of figures that this run has saved already.
    """
    formats = tuple(dict.fromkeys(["png", *record.config.formats]))
    figures = [spec for spec in document.figures if spec.name not in skip]
    for number, spec in enumerate(figures, start=1):
        require_time()
        with phase(f"Drawing figure {number} of {len(figures)}"):
            _save_figure(spec, record, formats, copy=copy)


def _save_figure(spec: FigureSpec, record: Record, formats: tuple[str, ...], *, copy: bool) -> None:
    """Save one figure in all formats, or copy the one that a chapter has drawn."""
    from vitlens.charts.style import of_width

    files = _figure_files(record.folder, "figures", spec.name, formats)
    chapter_folder, chapter_name = spec.chapter  # "" for a figure of no chapter
    if copy and chapter_folder:
        drawn = _figure_files(record.folder, f"{chapter_folder}/figures", chapter_name, formats)
        if all(file.is_file() for file in drawn.values()):
            for form, file in files.items():
                with write_atomically(file) as temporary:
                    shutil.copyfile(drawn[form], temporary)
            return
    with of_width(record.config.width):
        figure = spec.draw()
    _save(figure, files)


def _figure_files(folder: Path, below: str, name: str, formats: tuple[str, ...]) -> dict[str, Path]:
    """Return the file of a figure in each format, by format."""
    return {form: inside(folder, below, named_file(name, f".{form}")) for form in formats}


def _save(figure: "Figure", files: Mapping[str, Path]) -> None:
    """Save a figure in each format."""
    from matplotlib import rc_context

    from vitlens.report.html.pictures import CHART

    has_images = any(axes.images for axes in figure.axes)
    for form, path in files.items():
        metadata = _UNDATED.get(form, {})
        if form == "png" and not has_images:
            metadata = {"Description": CHART}  # a dark page may invert such a picture
        # without a salt, the ids inside an svg are drawn at random
        with write_atomically(path) as temporary, rc_context({"svg.hashsalt": "vitlens"}):
            figure.savefig(temporary, format=form, dpi=_DOTS_PER_INCH, metadata=metadata)


def write_tables(record: Record) -> None:
    """Write every table with rows as a CSV file, an interval as three columns."""
    for name, rows in record.tables.items():
        if not rows:
            continue
        cells_of_rows = [_visible_cells(flat(row)) for row in rows]
        columns: dict[str, None] = {}  # of any row, each once
        for cells in cells_of_rows:
            columns |= dict.fromkeys(cells)
        text = StringIO()
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(cells_of_rows)
        write_text(inside(record.folder, record.table_file(name)), text.getvalue())


def _visible_cells(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return cells, by column, in which the control characters of names are escapes."""
    visible_cells = {}
    for column, cell in cells.items():
        visible_cells[visible(column)] = visible(cell) if isinstance(cell, str) else cell
    return visible_cells


def _write(document: Document, record: Record, *, html: bool) -> Path:
    """Write the tables, report.md and, with html, report.html; return the path of the last."""
    write_tables(record)
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
    """Report an error in the block as a fault of the folder's contents.

    Anyone may have written or edited them, so reading them may raise any error.
    """
    try:
        yield
    except (InputError, StorageError, TooLongError):  # no faults of the contents
        raise
    except Exception as error:
        is_disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_disk_full:
            raise
        reasons = []
        if isinstance(run, Record):
            reasons += [f"no table {name}" for name in run.missing_tables]
        has_arrays = any(run.folder.glob("arrays")) or any(run.folder.glob("chapters/*/arrays"))
        if COMMANDS[run.command].contents.arrays and not has_arrays:
            reasons.append("no arrays/")
        if isinstance(error, RunError):
            reasons.append(str(error))
        # errors of Python itself would name no file or table: --debug shows them
        listed = " ".join(", ".join(reasons).split())[:_MOST_CHARACTERS]
        because = f" ({listed})" if listed else ""
        raise InputError(
            f"expected what vitlens {run.command} writes in {run.folder}, found files from which "
            f"no report can be made{because}; run the command again"
        ) from error


def figures_in(report: Path) -> tuple[str, ...]:
    """Return the names of the figures in an earlier report.md; none where there is no such file."""
    if not report.is_file():
        return ()
    return figures_shown(report.read_text(encoding="utf-8", errors="replace"))


def _remove_old_figures(
    folder: Path, shown_before: Iterable[str], *, keep: Collection[str]
) -> None:
    """Remove figures from a run's figures/ that the report does not show any more.

    shown_before: names from `figures_in`, before the report was written again.
    keep: names of the figures drawn now.

    A link, a file in another format and a file without matplotlib's signature stay, as they may be
    the user's.
    """
    old_files = set()
    for name in shown_before:
        if name not in keep:
            old_files |= {f"{name}.{form}" for form in get_args(FigureFormat)}
    for path in sorted((folder / "figures").glob("*")):
        if path.name not in old_files or path.is_symlink() or not path.is_file():
            continue
        if _SIGNATURE in path.read_bytes():
            path.unlink()
