"""The rows, metrics and arrays of `vitlens study`: chapters of a whole study, points of a --kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.run.chapters.record import CHAPTERS, METRICS
from vitlens.commands.shared.position_order import RANK_CORRELATION
from vitlens.commands.shared.receptive import FIELD_MAPS, FIELDS
from vitlens.commands.shared.trainings import TRAINING, TRAINING_IMAGES
from vitlens.commands.study.transfer.record import (
    MAP_ARRAYS,
    MOVED,
    PROBE_GAIN,
    SIMILARITY_ARRAYS,
    TRANSFER_TABLES,
)
from vitlens.records import ArraysOf, Contents, MetricName, Pixels, TableOf
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
    over seeds; training_bytes: what autograd keeps of one image in a training step (None: not measured); tokens: of an
    image in the first block, prefix included; patch: (height, width) in px; grid: patches (rows, columns).
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
    tokens: Count | None = None
    patch: tuple[Count, Count] | None = None
    grid: tuple[Count, Count] | None = None


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
    """A point compared with another on the same images; p_holm: corrected for the comparisons of its table.

    detectable: the smallest true difference in points that such a study finds with a probability of 80 % at the
    corrected level (None: not known).
    """

    label: str
    against: str
    p: float
    p_holm: float
    detectable: float | None = None


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

    @property
    def budget(self) -> str:
        """ "3 seeds, 6 epochs"."""
        counts = ((self.seeds, "seed"), (self.epochs, "epoch"))
        return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)


@dataclass(frozen=True)
class CorrectArrays:
    """correct: by row of the table of points (seeds, images), whether a prediction is correct."""

    correct: Annotated[Mapping[int, NDArray[np.bool_]], Form("b", (None, None))]


@dataclass(frozen=True)
class CutArrays:
    """image: the first test image (1, 3, height, width), which is shown as the patches of each point."""

    image: Pixels


@dataclass(frozen=True)
class PositionRow:
    """How well similarity of position embeddings follows nearness after one training (see RANK_CORRELATION): of all
    pairs, of those in one row and in one column; before: of all pairs before training; None where not defined."""

    label: str
    words: str
    seed: int
    all: float | None
    rows: float | None
    columns: float | None
    before: float | None


@dataclass(frozen=True)
class SimilarityArrays:
    """similarity: by row of the table of points, of those with position embeddings, the cosine of each pair (patches,
    patches) after the training with the first seed."""

    similarity: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]


LEFT_OUT = TableOf("left_out", LeftOutRow)
POINTS = TableOf("points", PointRow)
TRIALS = TableOf("trials", TrialRow)
DIFFERENCES = TableOf("differences", ComparisonRow)
STEPS = TableOf("steps", ComparisonRow)
RECIPES = TableOf("recipes", PointSettingRow)
DESIGN = TableOf("design", DesignRow)
AGAINST_BEST = TableOf("against_best", ComparisonRow, optional=True)
CORRECT = ArraysOf("correct", CorrectArrays)
CUT = ArraysOf("cut", CutArrays)
POSITION_ORDER = TableOf("position_order", PositionRow, optional=True)
POSITION_MAPS = ArraysOf("position_similarity", SimilarityArrays)

ACCURACY = MetricName("accuracy/{model}")
DIFFERENCE = MetricName("difference/{model}/{against}")
BEST = MetricName("best/{model}/{against}")  # a point against that of the highest accuracy
STEP = MetricName("step/{model}/{against}")  # a point against the one that it changes

TABLES: Final[tuple[TableOf[Any], ...]] = (
    CHAPTERS, LEFT_OUT, TRAINING, POINTS, TRIALS, DIFFERENCES, STEPS, RECIPES, DESIGN, AGAINST_BEST, FIELDS,
    POSITION_ORDER, *TRANSFER_TABLES,
)  # fmt: skip
RECORD = Contents(
    metrics=tuple(dict.fromkeys((ACCURACY, DIFFERENCE, STEP, BEST, RANK_CORRELATION, PROBE_GAIN, MOVED, *METRICS))),
    tables=TABLES,
    arrays=(CORRECT, CUT, POSITION_MAPS, TRAINING_IMAGES, FIELD_MAPS, MAP_ARRAYS, SIMILARITY_ARRAYS),
)


def left_out_words(rows: Sequence[LeftOutRow]) -> str:
    """The note on chapters that were left out."""
    return f"Left out, as they need labelled images: {', '.join(row.chapter for row in rows)}."
