"""The saved figures of reports in tests: all are drawn, few are laid out and encoded.

Saving is tested for every command by tests/kit/whole_folder.py; what figures show, by
tests/kernels/charts.
"""

import os
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.record import Record
    from vitlens.report.document import Document

_COARSE: Final = 50  # dots per inch
_WHOLE: Final[list[None]] = []  # one for each `saved_figures` that is entered
_PIXEL: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)


def save_little() -> None:
    """Save a report's PNGs with one pixel outside `saved_figures`, other formats as usual.

    Nothing waits until it is on the disk, which takes 5 ms thousands of times.
    """
    from vitlens.commands.run import publish
    from vitlens.files import write_atomically

    os.fsync = lambda _: None  # no test reads a folder after the machine has lost its power

    save_figure = publish._save

    def save(figure: "Figure", files: Mapping[str, Path]) -> None:
        if _WHOLE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(publish, "_DOTS_PER_INCH", _COARSE)
                save_figure(figure, files)
            return
        save_figure(figure, {form: path for form, path in files.items() if form != "png"})
        with write_atomically(files["png"]) as temporary:
            temporary.write_bytes(_PIXEL)

    publish._save = save


@contextmanager
def saved_figures() -> Iterator[None]:
    """Save complete but coarse figures inside the context."""
    _WHOLE.append(None)
    try:
        yield
    finally:
        _WHOLE.pop()


@contextmanager
def no_figures() -> Iterator[None]:
    """Draw no figure of a report, unless `saved_figures` is entered.

    Other tests draw these figures.
    """
    from vitlens.commands.run import publish

    plain = publish.save_figures

    def pixels(document: "Document", record: "Record", **options: Any) -> None:
        if _WHOLE:
            plain(document, record, **options)
            return
        for spec in document.figures:
            path = record.folder / "figures" / f"{spec.name}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_PIXEL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "save_figures", pixels)
        yield
