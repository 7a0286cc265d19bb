"""The report of `vitlens predict`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.predict.conclusions import findings, opening, verdicts
from vitlens.commands.predict.record import IMAGES, PREDICTIONS, FirstImages, PredictionRow
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table
from vitlens.report.findings import ranked
from vitlens.report.numbers import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 50  # of the report's table; results.json has them all


def report(record: Record) -> Document:
    """The most probable classes of each image."""
    rows = record.rows(PREDICTIONS)
    part = f" of the first {_ROWS} of {len(rows):,} images" if len(rows) > _ROWS else ""
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
    text, backing = opening(rows)
    lines = (Sentence(text, backing), *_least_sure(rows))
    summary = Section("Summary", lines, (table,), figures, leading=True)
    return Document(
        record.config.title,
        (summary,),
        limits=tuple(_limits(rows)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
    )


def _least_sure(rows: Sequence[PredictionRow]) -> Iterator[Sentence]:
    """The image whose prediction has the lowest probability."""
    if len(rows) > 1:
        row = min(rows, key=lambda row: row.probability_1)
        yield Sentence(
            f"The least certain prediction is that of {row.image}: {row.class_1} with {percent(row.probability_1, 1)}.",
            (row,),
        )


def _limits(rows: Sequence[PredictionRow]) -> Iterator[Sentence]:
    """What a list of predictions does not show."""
    surest = max(rows, key=lambda row: row.probability_1)
    yield Sentence(
        f"A probability is the model's own confidence, not its accuracy: that {surest.image} is {surest.class_1} with "
        f"{percent(surest.probability_1, 1)} does not say how often such a prediction is correct (vitlens evaluate).",
        (surest,),
    )


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
