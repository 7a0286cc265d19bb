"""The panels one by one, each an input and two maps, for a page that filters them."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.compare.record import CELLS, IMAGES, PANELS, SHEETS, SHOWN, ComparedImageRow
from vitlens.commands.compare.report.summary import cell_names
from vitlens.records import Record
from vitlens.report.document import ImagePanel, Tags
from vitlens.report.numbers import percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LITTLE, _MUCH = 0.3, 0.6
_MARKS: Final = {True: "✓", False: "✗"}


def panels(record: Record) -> Iterator[ImagePanel]:
    """The images of the sheet of panels, by rising agreement of the two maps."""
    rows = {row.image: row for row in record.rows(IMAGES)}
    names = dict(zip(CELLS.values(), cell_names(record.aliases)))
    shown = next((row.images for row in record.rows(SHEETS) if row.sheet == PANELS), ())
    for image in shown:
        row = rows[image]
        agreement = "no agreement" if row.agreement is None else f"agreement {row.agreement:.2f}"
        yield ImagePanel(
            f"{row.file}: {row.truth}, {agreement}",
            (
                f"true: {row.truth}",
                _answer(record.aliases[0], row.first_prediction, row.first_probability, row.truth),
                _answer(record.aliases[1], row.second_prediction, row.second_probability, row.truth),
            ),
            partial(_pictures, record, row),
            Tags(names[row.cell], row.truth, agreement_words(row.agreement)),
        )


def agreement_words(agreement: float | None) -> str:
    """A rank correlation of two maps as one of four words to filter by."""
    if agreement is None:
        return "not known"
    if agreement < _LITTLE:
        return f"below {_LITTLE}"
    return f"{_LITTLE} to {_MUCH}" if agreement < _MUCH else f"at least {_MUCH}"


def _answer(alias: str, prediction: str, probability: float, truth: str) -> str:
    return f"{alias}: {_MARKS[prediction == truth]} {prediction} ({percent(probability)})"


def _pictures(record: Record, row: ComparedImageRow) -> "tuple[NDArray[np.uint8], ...]":
    from vitlens.figures.compare import panel_pictures

    arrays = record.arrays(SHOWN)
    place = [each.image for each in record.rows(IMAGES)].index(row.image)
    return panel_pictures(
        image=arrays.pixels[place] / 255,
        maps=(arrays.first[place], arrays.second[place]),
        mask=None if arrays.masks is None else arrays.masks[place],
    )
