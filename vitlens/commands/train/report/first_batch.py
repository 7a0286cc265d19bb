"""The first training batch in the report of a training: as given, and as the model is trained on it."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitlens.commands.train.record import AUGMENTATION, CLASSES, FIRST_BATCH, FirstBatchArrays
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def augmentation(record: Record) -> Iterator[Section]:
    """How the images are augmented, with the first batch; nothing of a folder without it."""
    if not record.has(FIRST_BATCH):
        return
    for row in record.rows(AUGMENTATION):
        told = Sentence(
            f"The images are augmented anew in every epoch: {row.augmentation}. Of the {row.images} first images of "
            f"the first batch, {row.mixed} have a target of several classes.",
            (row,),
        )
        yield Section("Augmentation", (told,), figures=(_figure(record, record.arrays(FIRST_BATCH)),), leading=True)


def _figure(record: Record, arrays: FirstBatchArrays) -> FigureSpec:
    caption = (
        "The first images of the first training batch: as given, with their classes, and below each what the model is "
        "trained on, in pixels before normalisation, with the shares of the classes in its target (before label "
        "smoothing). A mixed image holds a part of the image before it in the batch."
    )
    return FigureSpec("first_batch", caption, partial(_draw, record, arrays))


def _draw(record: Record, arrays: FirstBatchArrays) -> "Figure":
    from vitlens.figures.train.first_batch import first_batch

    return first_batch(
        given=arrays.given.astype(np.float64) / 255,
        trained=arrays.trained.astype(np.float64) / 255,
        labels=arrays.labels,
        targets=arrays.targets,
        classes=[row.class_name for row in record.rows(CLASSES)],
    )
