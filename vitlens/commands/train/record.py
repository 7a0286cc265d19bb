"""What `vitlens train` writes."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.scaffold.pairs import PAIRS
from vitlens.commands.scaffold.trainings import TRAINING_IMAGES
from vitlens.records import ArraysOf, Contents, GivenName, MetricName, TableOf
from vitlens.training.metrics import EpochMetrics


@dataclass(frozen=True)
class TrainedClassRow:
    """One class of the test images; accuracy, low, high: None where it has no images."""

    class_name: GivenName
    n: int
    accuracy: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ImagesRow:
    """On how many images was trained and tested, in batches of which size; the usual ones are the recipe's.

    chosen: whether the batch size was typed.
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
    """One thing about how it was computed, in words."""

    how: str


@dataclass(frozen=True)
class StartRow:
    """The trained model that was trained further. last: its last so many blocks and the head, 0 for the head alone,
    None for everything; trained, parameters: how many of how many; notes: on its loading, in words."""

    model: GivenName
    weights: GivenName
    last: int | None
    trained: int
    parameters: int
    notes: str


@dataclass(frozen=True)
class TaughtRow:
    """How a teacher taught. token: whether the student has a token of its own for it; forms: of each training image
    that the teacher saw once, 0 where it saw the student's augmented images in every step."""

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
class LookRow:
    """Of a comparison of two ways of training: the test accuracy after so many epochs and seconds."""

    way: str
    epochs: int
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class ReachedRow:
    """When a way of training first came to a share of the best accuracy; epochs, seconds: None where it never did."""

    way: str
    share_of_best: float
    accuracy: float
    epochs: int | None
    seconds: float | None


@dataclass(frozen=True)
class ConfusionArrays:
    """counts (truth, prediction): of the data's classes, then what else the model knows."""

    counts: Annotated[NDArray[np.integer], Form("iu", (None, None))]


WAYS: Final = {"frozen": "the backbone frozen", "full": "everything trained"}  # of a comparison

HISTORY = TableOf("history", EpochMetrics)
CLASSES = TableOf("per_class", TrainedClassRow)
IMAGES = TableOf("images", ImagesRow)
RECIPE = TableOf("recipe", SettingRow)
COMPUTED = TableOf("computed", ComputedRow)
STARTED = TableOf("started", StartRow)
TAUGHT = TableOf("taught", TaughtRow)
BESIDE = TableOf("beside", BesideRow)
LOOKS = TableOf("points", LookRow)
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
    HISTORY, CLASSES, IMAGES, RECIPE, COMPUTED, STARTED, TAUGHT, BESIDE, PAIRS, LOOKS, REACHED,
)  # fmt: skip
RECORD = Contents(
    metrics=(ACCURACY, BEST_ACCURACY, SECONDS, PACE, EPOCH_SECONDS, AGREEMENT, DIFFERENCE),
    tables=TABLES,
    arrays=(CONFUSION, TRAINING_IMAGES),
)
