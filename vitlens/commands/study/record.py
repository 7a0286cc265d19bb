"""The rows, metrics and arrays of `vitlens study`: chapters of a whole study, points of a --kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.scaffold.chapters.record import CHAPTERS, METRICS
from vitlens.commands.scaffold.receptive.record import FIELD_MAPS, FIELDS
from vitlens.commands.scaffold.trainings import TRAINING, TRAINING_IMAGES
from vitlens.commands.study.transfer.record import (
    MAP_ARRAYS,
    MOVED,
    PROBE_GAIN,
    SIMILARITY_ARRAYS,
    TRANSFER_TABLES,
)
from vitlens.records import ArraysOf, Contents, MetricName, TableOf
from vitlens.schema import Count

POINTS_FOLDER: Final = "points"


@dataclass(frozen=True)
class LeftOutRow:
    """A chapter that was left out because it needs labels and there are none."""

    chapter: str


@dataclass(frozen=True)
class PointRow:
    """One point of a comparison: size, cost and training speed.

    flops: of one image's forward pass; place: on the axis of a kind that has one; images_per_second, seconds: medians
    over seeds; training_bytes: what autograd keeps of one image in a training step (None: not measured).
    """

    label: str
    words: str
    preset: str
    place: float | None
    parameters: Count
    flops: Count
    steps: Count
    train_images: Count
    images_per_second: float
    seconds: float
    training_bytes: Count | None = None


@dataclass(frozen=True)
class TrialRow:
    """One training of a point."""

    label: str
    seed: int
    accuracy: float
    seconds: float
    images_per_second: float


@dataclass(frozen=True)
class ComparisonRow:
    """A point compared with another on the same images; p_holm: corrected for the comparisons of its table."""

    label: str
    against: str
    p: float
    p_holm: float


@dataclass(frozen=True)
class PointSettingRow:
    """One setting of the recipe of a preset."""

    preset: str
    setting: str
    value: str


@dataclass(frozen=True)
class DesignRow:
    """How the points were trained: epochs, seeds, number of training images and classes, (height, width) in px."""

    kind: str
    epochs: int
    seeds: int
    train_images: int
    classes: int
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class CorrectArrays:
    """correct: by row of the table of points (seeds, images), whether a prediction is correct."""

    correct: Annotated[Mapping[int, NDArray[np.bool_]], Form("b", (None, None))]


LEFT_OUT = TableOf("left_out", LeftOutRow)
POINTS = TableOf("points", PointRow)
TRIALS = TableOf("trials", TrialRow)
DIFFERENCES = TableOf("differences", ComparisonRow)
STEPS = TableOf("steps", ComparisonRow)
RECIPES = TableOf("recipes", PointSettingRow)
DESIGN = TableOf("design", DesignRow)
AGAINST_BEST = TableOf("against_best", ComparisonRow, optional=True)
CORRECT = ArraysOf("correct", CorrectArrays)

ACCURACY = MetricName("accuracy/{model}")
DIFFERENCE = MetricName("difference/{model}/{against}")
BEST = MetricName("best/{model}/{against}")  # a point against that of the highest accuracy
STEP = MetricName("step/{model}/{against}")  # a point against the one that it changes

TABLES: Final[tuple[TableOf[Any], ...]] = (
    CHAPTERS, LEFT_OUT, TRAINING, POINTS, TRIALS, DIFFERENCES, STEPS, RECIPES, DESIGN, AGAINST_BEST, FIELDS,
    *TRANSFER_TABLES,
)  # fmt: skip
RECORD = Contents(
    metrics=tuple(dict.fromkeys((ACCURACY, DIFFERENCE, STEP, BEST, PROBE_GAIN, MOVED, *METRICS))),
    tables=TABLES,
    arrays=(CORRECT, TRAINING_IMAGES, FIELD_MAPS, MAP_ARRAYS, SIMILARITY_ARRAYS),
)


def left_out_words(rows: Sequence[LeftOutRow]) -> str:
    """The note on chapters that were left out."""
    return f"Left out, as they need labelled images: {', '.join(row.chapter for row in rows)}."
