"""The panels of a comparison as single files, panels/001.png ..., for slides and talks."""

from pathlib import Path
from typing import Any

from vitlens.files import RunRecord, write_atomically
from vitlens.places import inside
from vitlens.runs.compare_sheets import drawn_sheet, methods_words, sheet_images

FOLDER = "panels"
_DOTS_PER_INCH = 120


def write_panels(record: RunRecord) -> list[Path]:
    """One file for each image of the sheet of panels, in its order; returns them."""
    arrays: Any = record.arrays("images")
    table = record.table("images")
    written = []
    for sheet, rows in sheet_images(record):
        for index, row in enumerate(rows if sheet == "panels" else ()):
            title = f"{table[row]['file']}: {methods_words(record)}"
            figure = drawn_sheet(record, arrays, [row], title)
            path = inside(record.folder, FOLDER, f"{index + 1:03}.png")
            with write_atomically(path) as temporary:
                figure.savefig(temporary, dpi=_DOTS_PER_INCH)
            written.append(path)
    return written
