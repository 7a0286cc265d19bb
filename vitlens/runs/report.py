"""`vitlens report`: figures and report.md from a run's folder alone, as every run makes them at its end."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.displayed import for_figures, for_sentences
from vitlens.commands.scaffold.folder import RunFolder, require_plain
from vitlens.commands.scaffold.publish import report as report_of
from vitlens.errors import InputError, RunError, StorageError, UnknownNameError
from vitlens.files import RunRecord, named_file, read_run, write_atomically, write_text
from vitlens.places import inside
from vitlens.runs.sections import Section, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.md"
_DOTS_PER_INCH = 200
_PIXELS = 250_000_000  # of a figure that a folder asks for

# The module of each command that leaves a report; imported when its folder is read.
_COMMANDS: Final = {
    "study": "vitlens.runs.study",
}


@dataclass(frozen=True)
class Drawn:
    """A figure with its name (figures/<name>.png) and the caption: what to see, and what not to conclude."""

    name: str
    figure: "Figure"
    caption: str


Draw = Callable[[RunRecord], Iterator[Drawn]]
Tell = Callable[[RunRecord], list[Section]]


def publish(folder: RunFolder, draw: Draw, tell: Tell) -> Path:
    """Draw the figures of a run that ends now and write its report.md, from what lies in its folder alone.

    Returns the report's path. To be called last within the folder's block.
    """
    captions = _save(folder.record(), draw)
    return _write(folder.finish(), tell, captions)


def report(folder: Path) -> Path:
    """Draw the figures of an earlier run and write its report.md again; returns the report's path.

    Raises InputError when the folder is no run, holds links, or contents that no report can be made of;
    UnknownNameError when its command leaves no report.
    """
    record = read_run(folder)
    if record.command in COMMANDS:
        return report_of(folder)
    if record.command not in _COMMANDS:
        raise UnknownNameError("report of the command", record.command, _COMMANDS)
    require_plain(folder)
    module = import_module(_COMMANDS[record.command])
    with _foreign_contents(record):
        return _write(record, module.tell, _save(record, _bounded(module.draw)))


@contextmanager
def _foreign_contents(record: RunRecord) -> Iterator[None]:
    """What goes wrong inside is told as a fault of the folder's contents, which anyone may have written.

    Their tables are checked row by row only where they are used, by code that takes them for what a run writes.
    """
    try:
        yield
    except (InputError, StorageError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())[:200]
        raise InputError(
            f"expected what vitlens {record.command} writes in {record.folder}, found contents of which no report can "
            f"be made ({reason}); run the command again"
        ) from error


def _bounded(draw: Draw) -> Draw:
    """The same figures, unless one is larger than any report needs: its size may follow from numbers in a file."""

    def checked(record: RunRecord) -> Iterator[Drawn]:
        for drawn in draw(record):
            width, height = drawn.figure.get_size_inches()
            if width * height * _DOTS_PER_INCH**2 > _PIXELS:
                raise InputError(
                    f"expected a figure of at most {_PIXELS // 1_000_000} megapixels, found {drawn.name} of "
                    f"{width:.0f}x{height:.0f} inches asked for in {record.folder}; run the command again"
                )
            yield drawn

    return checked


def _save(record: RunRecord, draw: Draw) -> dict[str, str]:
    """Save every figure, one at a time, as png and in the run's other formats; their captions by name."""
    asked = record.config.get("formats")
    formats = dict.fromkeys(["png", *(asked if isinstance(asked, list) else [])])
    captions = {}
    for drawn in draw(for_figures(record)):
        for form in formats:
            path = inside(record.folder, "figures", named_file(drawn.name, f".{form}"))
            with write_atomically(path) as temporary:
                drawn.figure.savefig(temporary, format=form, dpi=_DOTS_PER_INCH, metadata=_undated(form))
        captions[drawn.name] = drawn.caption
    return captions


def _write(record: RunRecord, tell: Tell, captions: dict[str, str]) -> Path:
    path = inside(record.folder, REPORT)
    shown = for_sentences(record)
    write_text(path, markdown(shown, tell(shown), captions))
    return path


def _undated(form: str) -> dict[str, None]:
    """No date inside the file, so that the same run draws the same bytes."""
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
