"""The record of `vitlens compare`; its columns call the two models first and second."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.shared.calibration import CALIBRATION, CALIBRATION_ERROR
from vitlens.commands.shared.failures.rows import FAILURE_ARRAYS, FAILURE_TABLES
from vitlens.commands.shared.maps.on_object import ON_OBJECT
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.commands.shared.trainings import TRAINING
from vitlens.records import ArraysOf, Contents, Masks, MetricName, Pixels, TableOf, UntrustedName
from vitlens.uncertainty import Estimate

PANELS: Final = "panels"  # the sheet that shows images by rising agreement of the two maps

# columns of SliceRow: the cells of errors as analysis/failures/errors.py names them (a test compares the two)
CELLS: Final[Mapping[str, str]] = {
    "both_right": "both right",
    "only_first_wrong": "only first wrong",
    "only_second_wrong": "only second wrong",
    "both_wrong_alike": "both wrong, alike",
    "both_wrong_differently": "both wrong, differently",
}


@dataclass(frozen=True)
class MapMethodRow:
    """The attribution method of one model's maps."""

    model: str
    method: str


@dataclass(frozen=True)
class SliceRow:
    """A subset of the images: n, the number in each cell of errors, and the accuracy of both models.

    name: the class, or the number of the slice from 1.
    """

    name: UntrustedName
    n: int
    both_right: int
    only_first_wrong: int
    only_second_wrong: int
    both_wrong_alike: int
    both_wrong_differently: int
    first_accuracy: float
    first_low: float | None
    first_high: float | None
    second_accuracy: float
    second_low: float | None
    second_high: float | None

    @property
    def counts(self) -> tuple[int, ...]:
        """Images in each of CELLS."""
        return tuple(getattr(self, column) for column in CELLS)

    @property
    def first(self) -> Estimate:
        """Accuracy of the first model."""
        return Estimate(self.first_accuracy, self.first_low, self.first_high)

    @property
    def second(self) -> Estimate:
        """Accuracy of the second model."""
        return Estimate(self.second_accuracy, self.second_low, self.second_high)


@dataclass(frozen=True)
class NumberSliceRow(SliceRow):
    """About a quarter of the images, by rising value of a quantity; lowest, highest: its values in the slice."""

    number: str
    lowest: float
    highest: float


@dataclass(frozen=True)
class ConfusedPairRow:
    """A true class with a wrong prediction: first, second: images for which each model makes this error."""

    truth: UntrustedName
    prediction: UntrustedName
    first: int
    second: int


@dataclass(frozen=True)
class SeparationRow:
    """How well a quantity separates one model's failures from its successes.

    kind: what is measured; number: the quantity; area: under the ROC curve, the probability that a failure has the
    greater value, with its interval (None for too few images); failures, successes: images, with the medians of the
    quantity among them; p: two-sided, that the area is 0.5, p_holm: corrected for all tests of the table (None for too
    few images).
    """

    model: str
    kind: Literal["image", "attention", "map"]
    number: str
    area: float
    low: float | None
    high: float | None
    failures: int
    successes: int
    median_failure: float
    median_success: float
    p: float | None
    p_holm: float | None


@dataclass(frozen=True)
class ComparedImageRow:
    """One image that is shown. image: its index in the data; cell: a value of CELLS; agreement: rank correlation of the
    two maps, None where either is constant, has no positive value or is not finite."""

    image: int
    file: UntrustedName
    truth: UntrustedName
    cell: str
    agreement: float | None
    first_prediction: UntrustedName
    first_probability: float
    second_prediction: UntrustedName
    second_probability: float


@dataclass(frozen=True)
class SheetRow:
    """The images of a sheet in order. sheet: PANELS, or the value of CELLS of which they are examples."""

    sheet: str
    images: tuple[int, ...]


@dataclass(frozen=True)
class HarderRow:
    """One model under one disturbance at one level."""

    model: str
    kind: str
    level: float
    accuracy: float
    low: float | None
    high: float | None
    n: int | None

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.low, self.high, self.n)


@dataclass(frozen=True)
class DisturbedPairRow:
    """Both models on the same disturbed images: accuracy of the first minus that of the second, in points, with its
    paired interval. p: McNemar's exact test, p_holm: corrected for all rows of the table."""

    kind: str
    level: float
    difference: float
    low: float | None
    high: float | None
    n: int
    p: float
    p_holm: float

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high, self.n, "points")


@dataclass(frozen=True)
class ShapeBiasRow:
    """One model on the cue conflicts of one class of shape: predictions by shape and by texture among n images.

    data: the title of the data set; note: a remark on the predictions, or empty.
    """

    model: str
    class_name: UntrustedName
    n: int
    shape: int
    texture: int
    data: UntrustedName
    note: str


_Maps = Annotated[NDArray[np.floating], Form("f", (None, None, None))]
_Map = Annotated[NDArray[np.floating], Form("f", (None, None))]


@dataclass(frozen=True)
class ComparedPixelArrays:
    """By row of the table of images: pixels, the positive part of both models' maps, and masks where known."""

    pixels: Pixels
    first: _Maps
    second: _Maps
    masks: Masks | None = None


@dataclass(frozen=True)
class MeanMapArrays:
    """Both models' mean map as shares of its sum, and the rank correlation of the two maps of each sampled image."""

    first: _Map
    second: _Map
    agreement: Annotated[NDArray[np.floating], Form("f", (None,))]


METHODS = TableOf("methods", MapMethodRow)
BY_CLASS = TableOf("by_class", SliceRow)
BY_NUMBER = TableOf("by_number", NumberSliceRow)
CONFUSED = TableOf("confusions", ConfusedPairRow)
SEPARATIONS = TableOf("separations", SeparationRow)
IMAGES = TableOf("images", ComparedImageRow)
SHEETS = TableOf("sheets", SheetRow)
HARDER = TableOf("robustness", HarderRow)
DISTURBED_PAIRS = TableOf("disturbed_pairs", DisturbedPairRow, optional=True)
CONFLICTS = TableOf("shape_bias", ShapeBiasRow)
MAP_CHECKS = TableOf("map_checks", MapCheck, optional=True)  # of the methods of which each model's maps were chosen

SHOWN = ArraysOf("images", ComparedPixelArrays)
MEAN_MAPS = ArraysOf("mean_maps", MeanMapArrays)

ACCURACY = MetricName("accuracy/{model}")
DIFFERENCE = MetricName("accuracy_difference/{first}/{second}")
MCNEMAR_P = MetricName("mcnemar_p/{first}/{second}")
CELL_SHARE = MetricName("cell/{first}/{second}/{cell}")

USABLE = MetricName("maps/{model}/usable")  # not constant, finite, with a positive value
MAP_NUMBERS: Final[Mapping[str, MetricName]] = {  # means over usable maps; analysis/faithfulness/map_shares.py
    name: MetricName(f"maps/{{model}}/{name}") for name in ("half", "spread", "central", "row", "column", "inside")
}
POINTING = MetricName("localisation/{model}/pointing")
AGREEMENTS: Final[Mapping[str, MetricName]] = {
    name: MetricName(f"agreement/{{first}}/{{second}}/{name}") for name in ("spearman", "top", "shared")
}
HALF_DIFFERENCE = MetricName("half_difference/{first}/{second}")

HARDENED = MetricName("hardened_accuracy/{model}/{kind}/{level}")
SHAPE_BIAS = MetricName("shape_bias/{model}")
SHAPE_ANSWERS = MetricName("shape_answers/{model}")
TEXTURE_ANSWERS = MetricName("texture_answers/{model}")

RECORD = Contents(
    metrics=(
        ACCURACY, DIFFERENCE, MCNEMAR_P, CALIBRATION_ERROR, CELL_SHARE, USABLE, *MAP_NUMBERS.values(), POINTING,
        *AGREEMENTS.values(), HALF_DIFFERENCE, HARDENED, SHAPE_BIAS, SHAPE_ANSWERS, TEXTURE_ANSWERS,
    ),
    tables=(
        METHODS, MAP_CHECKS, CALIBRATION, BY_CLASS, BY_NUMBER, CONFUSED, SEPARATIONS, IMAGES, SHEETS, HARDER,
        DISTURBED_PAIRS, CONFLICTS, TRAINING, ON_OBJECT,
        *FAILURE_TABLES,
    ),
    arrays=(SHOWN, MEAN_MAPS, FAILURE_ARRAYS),
)  # fmt: skip
