"""The record of `vitlens evaluate`: its tables, metrics and arrays."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.scaffold.calibration import CALIBRATION, CALIBRATION_ERROR
from vitlens.commands.scaffold.pairs import PAIRS
from vitlens.commands.scaffold.trainings import TRAINING
from vitlens.records import ArraysOf, ClassNames, Contents, MetricName, Pixels, TableOf, UntrustedName
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ClassRow:
    """One class of the data, for one model; accuracy, low, high: None where it has no images."""

    model: str
    class_name: UntrustedName
    n: int
    accuracy: float | None
    low: float | None
    high: float | None

    @property
    def estimate(self) -> Estimate | None:
        """The accuracy with its interval."""
        return None if self.accuracy is None else Estimate(self.accuracy, self.low, self.high)


@dataclass(frozen=True)
class PredictedClassRow:
    """The n images that one model predicts as one class.

    confidence: the mean; accuracy: of these predictions; gap: confidence minus accuracy; p: of the hypothesis that each
    prediction is correct with the probability of its confidence; p_holm: corrected for the classes of the model.
    """

    model: str
    class_name: UntrustedName
    n: int
    confidence: float
    accuracy: float
    gap: float
    low: float | None
    high: float | None
    p: float
    p_holm: float

    @property
    def estimate(self) -> Estimate:
        """The gap with its interval."""
        return Estimate(self.gap, self.low, self.high, self.n)


@dataclass(frozen=True)
class ConfusionRow:
    """How many images of one class one model takes for another; only cells that are not 0."""

    model: str
    truth: UntrustedName
    prediction: UntrustedName
    count: int


_Indices = Annotated[NDArray[np.integer], Form("iu", (None,))]
_Shares = Annotated[NDArray[np.floating], Form("f", (None,))]


@dataclass(frozen=True)
class PredictionArrays:
    """Every prediction of one model, as indices into classes, and the pixels of a few images.

    likely_classes, likely_probabilities (images, 5): the most probable classes; random: indices of images drawn at
    random; surest_errors: indices of the errors with the highest confidence, highest first.
    """

    classes: ClassNames
    label: _Indices
    prediction: _Indices
    probability: _Shares
    likely_classes: Annotated[NDArray[np.integer], Form("iu", (None, None))]
    likely_probabilities: Annotated[NDArray[np.floating], Form("f", (None, None))]
    random: _Indices
    random_pixels: Pixels
    surest_errors: _Indices
    surest_errors_pixels: Pixels


CLASSES = TableOf("per_class", ClassRow)
PREDICTED = TableOf("by_prediction", PredictedClassRow, optional=True)
CONFUSIONS = TableOf("confusion", ConfusionRow)
PREDICTIONS = ArraysOf("predictions-{model}", PredictionArrays)

ACCURACY = MetricName("accuracy/{model}")
TOP5 = MetricName("top5_accuracy/{model}")
CROSS_ENTROPY = MetricName("cross_entropy/{model}")
CONFIDENCE_GAP = MetricName("confidence_gap/{model}")  # mean confidence minus accuracy
DIFFERENCE = MetricName("accuracy_difference/{first}/{second}")

RECORD = Contents(
    metrics=(ACCURACY, TOP5, CROSS_ENTROPY, CALIBRATION_ERROR, CONFIDENCE_GAP, DIFFERENCE),
    tables=(CLASSES, PREDICTED, CONFUSIONS, CALIBRATION, PAIRS, TRAINING),
    arrays=(PREDICTIONS,),
)
