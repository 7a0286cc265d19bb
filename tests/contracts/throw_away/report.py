"""The report of `vitlens brightness`, from its record."""

from functools import partial
from typing import TYPE_CHECKING

from tests.contracts.throw_away.record import BRIGHTNESS, IMAGES, ROWS, BrightnessArrays
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Table, sentences
from vitlens.report.numbers import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report(record: Record) -> Document:
    """One sentence, one table, one figure."""
    (alias,), rows = record.aliases, record.rows(IMAGES)
    mean = record.metric(BRIGHTNESS(model=alias))
    table = Table.of("Images", rows, {"image": lambda row: row.image, "brightness": lambda row: row.brightness})
    figure = FigureSpec("brightness", "Rows of pixels.", partial(_draw, record.arrays(ROWS, model=alias)))
    text = sentences(f"The mean pixel is {in_words(mean)}.", rows=(mean,))
    summary = Section("Summary", text, (table,), (figure,), leading=True)
    return Document(record.config.title, (summary,), limits=sentences("It is not what a model sees.", rows=(mean,)))


def _draw(arrays: BrightnessArrays) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot(arrays.rows.T)
    return figure
