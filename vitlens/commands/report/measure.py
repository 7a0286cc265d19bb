"""Write the report of an earlier run again, compare it with another run, or copy it; no torch."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from vitlens import files
from vitlens.arrays import read_arrays, write_arrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.options import ReportOptions
from vitlens.commands.report.record import ComparedRuns
from vitlens.commands.report.report import REPORT, compared_runs
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.folder import make_folder, require_plain
from vitlens.commands.run.publish import PAGE, read_folder, report, write_portfolio, write_tables
from vitlens.errors import InputError
from vitlens.files import inside
from vitlens.record import CONFIG, RESULTS, read_run
from vitlens.report.escape import without_machine_paths
from vitlens.report.markdown import markdown, summary_lines

COMPARISON = "comparison.md"
COMPARISON_PAGE = "comparison.html"


def measure(options: ReportOptions) -> Conclusion:
    """Write the report, the comparison or the copy; return its path and what it concludes.

    Raises InputError for a folder without a run, and for options that exclude each other.
    """
    if options.compare is not None and options.share is not None:
        raise InputError(
            "expected --compare or --share, found both; compare first, then share the folder"
        )
    if options.share is None:
        _require_writable(options.folder)
    if options.portfolio:
        if options.compare is not None or options.share is not None:
            raise InputError(
                "expected --portfolio without --compare and --share, found both; leave one out"
            )
        return Conclusion(write_portfolio(options.folder, html=options.html), (), holds=True)
    if options.compare is not None:
        return compare(options.compare, options.folder, html=options.html)
    if options.share is None:
        return _write_again(options.folder, html=options.html)
    has_page = inside(options.folder, PAGE).is_file()
    copy = share(options.folder, options.share)
    return _write_again(copy, html=options.html or has_page)


def _require_writable(folder: Path) -> None:
    """Raise OutputError if nothing can be written into the folder of a run."""
    read_run(folder)  # first, that it is one
    copying = shlex.join(["vitlens", "report", str(folder), "--share", "NEW"])
    files.require_writable(
        folder,
        purpose="for its report",
        hint=f"make it writable, or take a copy: {copying}",
    )


def _write_again(folder: Path, *, html: bool) -> Conclusion:
    """Write the report of a folder again, with a line about tables that it leaves out."""
    path = report(folder, html=html)
    return Conclusion(path, _unknown_tables(folder), holds=True)


def _unknown_tables(*folders: Path) -> tuple[str, ...]:
    """Return a line for each folder with tables that this version does not know."""
    lines = []
    for folder in folders:
        run = read_run(folder)
        declared = COMMANDS[run.command].contents.tables
        unknown = [name for name in run.results["tables"] if name not in declared]
        if unknown:
            lines.append(
                f"Left out tables of {folder} that this version does not know: {', '.join(unknown)}"
            )
    return tuple(lines)


def compare(before: Path, after: Path, *, html: bool = False) -> Conclusion:
    """Write what changed from one run to another into the folder of the later run.

    The tables of all rows are written into comparison/ there.

    html: True to write comparison.html, too. If the folder has one, it is always written.

    Raises InputError unless both folders are finished runs of one command, with the same number of
    models, and for one folder.
    """
    if before.resolve() == after.resolve():
        raise InputError(f"expected two folders to compare, found {after} twice; name another run")
    run_before = read_folder(before)
    run_after = read_folder(after)
    page_path = inside(run_after.folder, COMPARISON_PAGE)
    html = html or page_path.is_file()
    command_line = ["vitlens", "report", "--compare", str(before), str(after)]
    if html:
        command_line.append("--html")
    runs = compared_runs(run_before, run_after, shlex.join(command_line))
    document = REPORT(runs)
    _remove_tables(runs)
    write_tables(runs)
    path = inside(run_after.folder, COMPARISON)
    files.write_text(path, markdown(document, runs))
    if html:
        from vitlens.report.html import page

        path = page_path
        files.write_text(path, page(document, runs))
    lines = (*_unknown_tables(before, after), *summary_lines(document))
    return Conclusion(path, lines, holds=not runs.worse)


def _remove_tables(runs: ComparedRuns) -> None:
    """Remove the tables of an earlier comparison, as a table without rows is not written."""
    for name in runs.tables:
        inside(runs.folder, runs.table_file(name)).unlink(missing_ok=True)


def share(folder: Path, copy: Path) -> Path:
    """Copy the records and arrays of a run, and of its chapters, to a new folder.

    Returns the new folder, without a report yet. Absolute paths are shortened to their last two
    components, e.g. "photos/cat.jpg".

    Raises InputError for a folder without a run and for a copy inside the folder, OutputError if
    the copy cannot be made.
    """
    read_run(folder)
    require_plain(folder)
    if folder.resolve() in (copy.resolve(), *copy.resolve().parents):
        raise InputError(f"expected --share with a folder outside {folder}, found {copy}")
    make_folder(copy, overwrite=False, option="--share")
    try:
        _copy(folder, copy)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)  # no incomplete copy is left
        raise
    return copy


def _copy(folder: Path, copy: Path) -> None:
    """Copy the records and arrays of a run, then those of its chapters in the same way."""
    for name in (CONFIG, RESULTS):
        content = files.read_json(inside(folder, name))
        files.write_json(copy / name, _shorten_paths(content))
    for path in _contents(folder, "arrays"):
        if path.suffix == ".npz":
            arrays = dict(read_arrays(path))
            write_arrays(inside(copy, "arrays", path.name), _shorten_paths(arrays))
    for path in _contents(folder, "chapters"):
        if (path / RESULTS).is_file():
            chapter = inside(copy, "chapters", path.name)
            chapter.mkdir(parents=True)
            _copy(path, chapter)


def _contents(folder: Path, name: str) -> list[Path]:
    """Return the files and folders in a folder of a run; none if the run has no such folder."""
    place = inside(folder, name)
    if not place.is_dir():
        return []
    return sorted(place.iterdir())


def _shorten_paths(value: Any) -> Any:
    """Return a JSON value, or an array, with all paths in its texts and keys shortened."""
    if isinstance(value, str):
        return without_machine_paths(value)
    if isinstance(value, list):
        return [_shorten_paths(entry) for entry in value]
    if isinstance(value, dict):
        shortened = {}
        for key, entry in value.items():
            shortened[without_machine_paths(key)] = _shorten_paths(entry)
        return shortened
    if isinstance(value, np.ndarray) and value.dtype.kind == "U" and value.size:
        texts = [_shorten_paths(str(text)) for text in value.flat]
        return np.array(texts).reshape(value.shape)
    return value
