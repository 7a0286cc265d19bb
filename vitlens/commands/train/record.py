"""The rows, metrics and arrays that `vitlens train` writes."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.scaffold.pairs import PAIRS
from vitlens.commands.scaffold.trainings import TRAINING_IMAGES
from vitlens.records import ArraysOf, Contents, MetricName, TableOf, UntrustedName
from vitlens.training.metrics import EpochMetrics


@dataclass(frozen=True)
class TrainedClassRow:
    """One class of the test images; accuracy, low, high: None where it has no images."""

    class_name: UntrustedName
    n: int
    accuracy: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ImagesRow:
    """The numbers of training and test images, and the batch size; the usual ones are the recipe's.

    chosen: whether the batch size was set by an option.
    """

    training: int
    test: int
    batch_size: int
    learning_rate: float
    usual_batch_size: int
    usual_learning_rate: float
    chosen: bool


@dataclass(frozen=True)
class SettingRow:
    """One setting of the recipe."""

    setting: str
    value: str


@dataclass(frozen=True)
class ComputedRow:
    """One note on the computation (precision, compilation), in words."""

    how: str


@dataclass(frozen=True)
class StartRow:
    """The trained model that was fine-tuned. last: how many of its last blocks were trained with the head, 0 for the
    head alone, None for all weights; trained, parameters: how many of how many; notes: on its loading, in words."""

    model: UntrustedName
    weights: UntrustedName
    last: int | None
    trained: int
    parameters: int
    notes: str


@dataclass(frozen=True)
class TaughtRow:
    """The settings of a distillation. token: whether the student has a distillation token; forms: of each training
    image on which the teacher's outputs were computed once, 0 where they were computed on the student's augmented
    images in every step."""

    teacher: str
    kind: str
    weight: float
    temperature: float
    token: bool
    forms: int


@dataclass(frozen=True)
class BesideRow:
    """One of the models compared on the test images. role: "student", "teacher" or "plain"; agreement: with the
    teacher's predictions, None for itself."""

    model: str
    role: str
    n: int
    accuracy: float
    low: float | None
    high: float | None
    agreement: float | None
    agreement_low: float | None
    agreement_high: float | None


@dataclass(frozen=True)
class TestAccuracyRow:
    """The test accuracy of one of two ways of training after so many epochs and seconds."""

    way: str
    epochs: int
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class ReachedRow:
    """When a way of training first reached a share of the best accuracy; epochs, seconds: None where it never did."""

    way: str
    share_of_best: float
    accuracy: float
    epochs: int | None
    seconds: float | None


@dataclass(frozen=True)
class ConfusionArrays:
    """counts (truth, prediction): of the data's classes, then the model's other classes."""

    counts: Annotated[NDArray[np.integer], Form("iu", (None, None))]


WAYS: Final = {"frozen": "the backbone frozen", "full": "all weights trained"}  # of a comparison

HISTORY = TableOf("history", EpochMetrics)
CLASSES = TableOf("per_class", TrainedClassRow)
IMAGES = TableOf("images", ImagesRow)
RECIPE = TableOf("recipe", SettingRow)
COMPUTED = TableOf("computed", ComputedRow)
STARTED = TableOf("started", StartRow)
TAUGHT = TableOf("taught", TaughtRow)
BESIDE = TableOf("beside", BesideRow)
TEST_ACCURACIES = TableOf("points", TestAccuracyRow)
REACHED = TableOf("reached", ReachedRow)
CONFUSION = ArraysOf("confusion", ConfusionArrays)

ACCURACY = MetricName("accuracy/{model}")
BEST_ACCURACY = MetricName("best_accuracy/{model}")
SECONDS = MetricName("training_seconds/{model}")
PACE = MetricName("images_per_second/{model}")
EPOCH_SECONDS = MetricName("seconds_per_epoch/{model}")
AGREEMENT = MetricName("agreement_with_teacher/{model}")
DIFFERENCE = MetricName("accuracy_difference/{first}/{second}")

TABLES: Final[tuple[TableOf[Any], ...]] = (
    HISTORY, CLASSES, IMAGES, RECIPE, COMPUTED, STARTED, TAUGHT, BESIDE, PAIRS, TEST_ACCURACIES, REACHED,
)  # fmt: skip
RECORD = Contents(
    metrics=(ACCURACY, BEST_ACCURACY, SECONDS, PACE, EPOCH_SECONDS, AGREEMENT, DIFFERENCE),
    tables=TABLES,
    arrays=(CONFUSION, TRAINING_IMAGES),
)
