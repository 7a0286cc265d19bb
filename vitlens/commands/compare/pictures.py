"""The images of `vitlens compare`, with both models' maps and predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.charts import Picture, pixels
from vitlens.commands.compare.claims import maps_comparable
from vitlens.commands.compare.record import CompareRecord, ImageRow
from vitlens.report.document import ImagePanel, Tags
from vitlens.report.prose import say

PICTURED: Final = 6  # images of a figure
SHEET: Final = 18  # images of a sheet of all panels
LITTLE: Final = 0.3  # rank correlation of two maps below which they agree little
MUCH: Final = 0.6  # rank correlation from which they agree well
# cells with the errors of one model, and the column with the confidence of that model
_ERRORS: Final = {
    "only-first-wrong": "first_probability",
    "only-second-wrong": "second_probability",
}


def errors_of_one_model(record: CompareRecord) -> Iterator[Picture]:
    """Yield the most confident errors that only one model makes, three of each; without any, images
    of the panels.
    """
    errors: list[ImageRow] = []
    for cell, confidence in _ERRORS.items():
        rows = [row for row in record.images_shown if row.example and row.cell == cell]
        rows.sort(key=attrgetter(confidence), reverse=True)
        errors += rows[: PICTURED // 2]
    yield from _pictures(record, errors or panel_rows(record)[:PICTURED])


def spread_of_panels(record: CompareRecord) -> Iterator[Picture]:
    """Yield a few panels, evenly spaced by agreement."""
    panels = panel_rows(record)
    count = min(PICTURED, len(panels))
    positions = np.linspace(0, len(panels) - 1, count).round().astype(int)
    rows = [panels[position] for position in dict.fromkeys(positions.tolist())]
    yield from _pictures(record, rows)


def sheets_of_panels(record: CompareRecord) -> Iterator[Picture]:
    """Yield all panels by rising agreement, SHEET on a sheet; nothing where a figure shows all."""
    panels = panel_rows(record)
    if len(panels) <= PICTURED:
        return
    pictures_of_panel = 1 + len(record.aliases)  # the input, and the map of each model
    pictures_of_sheet = pictures_of_panel * SHEET
    for position, picture in enumerate(_pictures(record, panels)):
        yield replace(picture, sheet=1 + position // pictures_of_sheet)


def panel_rows(record: CompareRecord) -> list[ImageRow]:
    """Return the images of the panels by rising agreement."""
    rows = [row for row in record.images_shown if row.panel is not None]
    return sorted(rows, key=lambda row: row.panel or 0)  # no panel is None here


def _pictures(record: CompareRecord, rows: Sequence[ImageRow]) -> Iterator[Picture]:
    """Yield a column for each image: the input, and the map of each model with its prediction."""
    arrays = record.shown
    if arrays is None:
        return
    positions = {row.image: position for position, row in enumerate(record.images_shown)}
    labels = {row.model: f"{row.model}: {row.method}" for row in record.methods}
    comparable = maps_comparable(record)
    for number, row in enumerate(rows, start=1):
        column = str(number)
        if comparable and row.agreement is not None:
            column += f": agreement {row.agreement:.2f}"
        position = positions[row.image]
        image = arrays.pixels[position] / np.float32(255)
        mask = None
        if arrays.masks is not None:
            mask = arrays.masks[position]
        yield Picture(image, row="input", column=column, below=row.truth, mask=mask)
        maps = (arrays.first[position], arrays.second[position])
        for alias, values, (prediction, probability) in zip(record.aliases, maps, row.predicted):
            picture = Picture.predicted(
                image, prediction, probability, row.truth, row=labels.get(alias, alias)
            )
            crossed = "uniform" if values.max() <= values.min() else ""
            yield replace(picture, map=values, column=column, mask=mask, crossed=crossed)


def image_panels(record: CompareRecord) -> Iterator[ImagePanel]:
    """Yield the panels by rising agreement, then the other examples, for a page that can filter
    them.
    """
    names = {row.cell: row.name for row in record.cells}
    examples = [row for row in record.images_shown if row.panel is None]
    for row in [*panel_rows(record), *examples]:
        agreement = "no agreement"
        if row.agreement is not None:
            agreement = say("agreement {{ value|number }}", value=row.agreement)
        captions = [say("true: {{ row.truth }}", row=row)]
        for alias, (prediction, probability) in zip(record.aliases, row.predicted):
            caption = say(
                "{{ alias }}: {{ '✓' if prediction == row.truth else '✗' }} {{ prediction }} "
                "({{ probability|percent }})",
                alias=alias,
                row=row,
                prediction=prediction,
                probability=probability,
            )
            captions.append(caption)
        yield ImagePanel(
            say("{{ row.file }}: {{ row.truth }}, {{ agreement }}", row=row, agreement=agreement),
            tuple(captions),
            partial(_pixels, record, row),
            Tags(
                _as_text(names[row.cell]),
                _as_text(row.truth),
                agreement_words(row.agreement),
            ),
        )


def _as_text(name: str) -> str:
    """Return a name from files or the user, marked as text by `say`."""
    return say("{{ name }}", name=name)


def _pixels(record: CompareRecord, row: ImageRow) -> tuple[NDArray[np.uint8], ...]:
    return tuple(pixels(picture) for picture in _pictures(record, [row]))


def agreement_words(agreement: float | None) -> str:
    """Return a range of rank correlations by which a page filters images."""
    if agreement is None:
        return "not known"
    if agreement < LITTLE:
        return f"below {LITTLE}"
    if agreement < MUCH:
        return f"{LITTLE} to {MUCH}"
    return f"at least {MUCH}"
