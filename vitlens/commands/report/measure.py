"""The figures and report.md of an earlier run, its comparison with another, or a copy; torch is not imported."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from vitlens import files
from vitlens.arrays import read_arrays, write_arrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.options import ReportOptions
from vitlens.commands.report.report import REPORT, compared_runs
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.folder import make_folder, require_plain
from vitlens.commands.run.publish import PAGE, read_folder, report
from vitlens.errors import InputError
from vitlens.files import inside
from vitlens.record import CONFIG, RESULTS, read_run
from vitlens.report.escape import without_machine_paths
from vitlens.report.markdown import markdown, summary_lines

COMPARISON = "comparison.md"
COMPARISON_PAGE = "comparison.html"


def measure(options: ReportOptions) -> Conclusion:
    """Make them again; returns the report's path. Raises InputError for a folder that is no run's."""
    if options.compare is not None and options.share is not None:
        raise InputError("expected --compare or --share, found both; share a folder after it was compared")
    if options.compare is not None:
        return compared(options.compare, options.folder, html=options.html)
    if options.share is None:
        return _written_again(options.folder, html=options.html)
    page = options.html or inside(options.folder, PAGE).is_file()
    return _written_again(share(options.folder, options.share), html=page)


def _written_again(folder: Path, *, html: bool) -> Conclusion:
    """Write the report of a folder again, with a line about tables that it leaves out."""
    path = report(folder, html=html)
    return Conclusion(path, _left_out(folder), holds=True)


def _left_out(*folders: Path) -> tuple[str, ...]:
    """Return a line for each folder with tables that this version does not know."""
    lines = []
    for folder in folders:
        run = read_run(folder)
        known = COMMANDS[run.command].contents.tables
        unknown = [name for name in run.results["tables"] if name not in known]
        if unknown:
            lines.append(f"Left out tables of {folder} that this version does not know: {', '.join(unknown)}")
    return tuple(lines)


def compared(before: Path, after: Path, *, html: bool = False) -> Conclusion:
    """Write what changed from one run to another, into the folder of the later one.

    html: write comparison.html, too; this is also done where the folder holds one, as `report` does with its page.
    Raises InputError for folders that are no runs of one command, done, with as many models.
    """
    first = read_folder(before)
    second = read_folder(after)
    page_path = inside(second.folder, COMPARISON_PAGE)
    html = html or page_path.is_file()
    line = shlex.join(["vitlens", "report", "--compare", str(before), str(after), *(["--html"] if html else [])])
    runs = compared_runs(first, second, line)
    written = REPORT(runs)
    path = inside(second.folder, COMPARISON)
    files.write_text(path, markdown(written, runs))
    if html:
        from vitlens.report.html import page

        path = page_path
        files.write_text(path, page(written, runs))
    lines = (*_left_out(before, after), *summary_lines(written))
    return Conclusion(path, lines, holds=not runs.worse)


def share(folder: Path, copy: Path) -> Path:
    """Copy the records and arrays of a run, and of its chapters, to a new folder, absolute paths shortened.

    Only the last two components of a path stay, e.g. "photos/cat.jpg". Returns the new folder, whose report is still to
    be written. Raises InputError where the folder is no run or the copy lies within it, OutputError where the copy
    cannot be made.
    """
    read_run(folder)
    require_plain(folder)
    if folder.resolve() in (copy.resolve(), *copy.resolve().parents):
        raise InputError(f"expected --share with a folder outside {folder}, found {copy}")
    make_folder(copy, overwrite=False)
    try:
        _copy(folder, copy)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)  # nothing half-written looks whole
        raise
    return copy


def _copy(folder: Path, copy: Path) -> None:
    for name in (CONFIG, RESULTS):
        files.write_json(copy / name, _shortened(files.read_json(inside(folder, name))))
    for path in _within(folder, "arrays"):
        if path.suffix == ".npz":
            write_arrays(inside(copy, "arrays", path.name), _shortened(dict(read_arrays(path))))
    for path in _within(folder, "chapters"):
        if (path / RESULTS).is_file():
            inside(copy, "chapters", path.name).mkdir(parents=True)
            _copy(path, inside(copy, "chapters", path.name))


def _within(folder: Path, name: str) -> list[Path]:
    """Return what lies in a folder of a run; nothing where it has none."""
    place = inside(folder, name)
    return sorted(place.iterdir()) if place.is_dir() else []


def _shortened(value: Any) -> Any:
    """Return a value of JSON, or an array of texts, with the paths in it shortened, in keys too; others as they are."""
    if isinstance(value, str):
        return without_machine_paths(value)
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {without_machine_paths(key): _shortened(each) for key, each in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind == "U" and value.size:
        return np.array([_shortened(str(each)) for each in value.flat]).reshape(value.shape)
    return value
