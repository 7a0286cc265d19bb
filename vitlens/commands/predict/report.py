"""The report of `vitlens predict`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.predict.record import IMAGES, PREDICTIONS, FirstImages, PredictionRow
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Table, sentences
from vitlens.report.numbers import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 50  # of the report's table; results.json has them all
_LIMIT: Final = "A probability is the model's own confidence, not its accuracy: vitlens evaluate shows its calibration."


def report(record: Record) -> Document:
    """The most probable classes of each image."""
    rows = record.rows(PREDICTIONS)
    part = f" (the first {_ROWS} of {len(rows)})" if len(rows) > _ROWS else ""
    table = Table.of(
        f"Predictions{part}",
        rows[:_ROWS],
        {
            "image": lambda row: row.image,
            "most probable classes": lambda row: ", ".join(
                f"{name} {100 * share:.1f} %" for name, share in row.top_classes
            ),
            "label": lambda row: row.label,
        },
    )
    figures = tuple(_grid(rows, record.arrays(IMAGES)))
    count = f"{in_words(len(rows))} image{'' if len(rows) == 1 else 's'}."
    summary = Section("Summary", sentences(count), (table,), figures, leading=True)
    return Document(record.config.title, (summary,), limits=sentences(_LIMIT))


def _grid(rows: Sequence[PredictionRow], images: FirstImages) -> Iterator[FigureSpec]:
    """The first images with their predictions, where labels are known: the grid marks the correct ones."""
    shown = [(row, row.label) for row in rows[: len(images.pixels)]]
    labelled = [(row, label) for row, label in shown if label is not None]
    if len(labelled) == len(shown):
        yield FigureSpec(
            "predictions",
            f"The first {len(shown)} images with their predicted class and its probability. They are too few to "
            "estimate accuracy: see vitlens evaluate.",
            partial(_draw, labelled, images),
        )


def _draw(labelled: Sequence[tuple[PredictionRow, str]], images: FirstImages) -> "Figure":
    from vitlens.figures.evaluate import prediction_grid

    names = sorted({name for row, label in labelled for name in (row.class_1, label)})
    return prediction_grid(
        images=images.pixels.astype(np.float32) / 255,
        predicted=[names.index(row.class_1) for row, _ in labelled],
        probability=[row.probability_1 for row, _ in labelled],
        truth=[names.index(label) for _, label in labelled],
        classes=names,
    )
