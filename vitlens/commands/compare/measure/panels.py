"""The panels of a comparison as single files, panels/001.png ..., for slides and talks."""

from pathlib import Path
from typing import Final

from vitlens.commands.compare.record import PANELS
from vitlens.commands.compare.report.maps import drawn_sheet, methods_words, sheet_images
from vitlens.commands.scaffold.publish import unprotect
from vitlens.files import write_atomically
from vitlens.places import inside
from vitlens.records import Record

_DOTS_PER_INCH: Final = 120


def write_panels(record: Record) -> list[Path]:
    """One file for each image of the sheet of panels, in its order; returns them."""
    written = []
    for index, image in enumerate(sheet_images(record).get(PANELS, ())):
        figure = drawn_sheet(record, [image], f"{image.file}: {methods_words(record)}")
        unprotect(figure)
        path = inside(record.folder, PANELS, f"{index + 1:03}.png")
        with write_atomically(path) as temporary:
            figure.savefig(temporary, dpi=_DOTS_PER_INCH)
        written.append(path)
    return written
