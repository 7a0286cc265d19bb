"""The rows, metrics and arrays of `vitlens train`."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.shared.pairs import PAIRS
from vitlens.commands.shared.trainings import TRAINING_IMAGES, Budget
from vitlens.records import ArraysOf, Contents, MetricName, Pixels, TableOf, UntrustedName
from vitlens.training.check.rows import BatchLossRow, CheckRow, LayerRow
from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class TrainedClassRow:
    """One class of the test images; accuracy, low, high: None where it has no images."""

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
class ImagesRow:
    """The numbers of training and test images, the batch size and the learning rate; usual_*: those of the recipe.

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
class FineTunedRow:
    """The trained model that was fine-tuned. last: how many of its last blocks were trained with the head, 0 for the
    head alone, None for all weights; trained: how many of its parameters were trained; notes: on its loading."""

    model: UntrustedName
    weights: UntrustedName
    last: int | None
    trained: int
    parameters: int
    notes: str


@dataclass(frozen=True)
class DistillationRow:
    """The settings of a distillation. token: whether the student has a distillation token; forms: how many versions of
    each training image (1: itself; 2: also mirrored) the teacher's outputs were computed on, once; 0 where they were
    computed on the student's augmented images in every step."""

    teacher: str
    kind: str
    weight: float
    temperature: float
    token: bool
    forms: int


@dataclass(frozen=True)
class StudentTeacherRow:
    """One of the models that are compared on the test images. role: "student", "teacher" or "plain"; agreement: with
    the teacher's predictions, None for itself."""

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
    """The test accuracy of one of the two ways of training at one evaluation; epochs, seconds: of training until
    then."""

    way: str
    epochs: int
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class TimeToAccuracyRow:
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


@dataclass(frozen=True)
class AugmentationRow:
    """The recipe's augmentation in words; mixed: how many of the `images` first images of the first batch have a target
    of several classes."""

    augmentation: str
    images: int
    mixed: int


@dataclass(frozen=True)
class FirstBatchArrays:
    """The first images of the first training batch, as given and as the model takes them; labels: of the images as
    given; targets (image, class): shares of the classes."""

    given: Pixels
    trained: Pixels
    labels: Annotated[NDArray[np.integer], Form("iu", (None,))]
    targets: Annotated[NDArray[np.floating], Form("f", (None, None))]


WAYS: Final = {"frozen": "the backbone frozen", "full": "all weights trained"}  # of a comparison

HISTORY = TableOf("history", EpochMetrics)
CLASSES = TableOf("per_class", TrainedClassRow)
IMAGES = TableOf("images", ImagesRow)
RECIPE = TableOf("recipe", SettingRow)
COMPUTED = TableOf("computed", ComputedRow)
FINE_TUNED = TableOf("started", FineTunedRow)
DISTILLATION = TableOf("taught", DistillationRow)
STUDENT_AND_TEACHER = TableOf("beside", StudentTeacherRow)
TEST_ACCURACIES = TableOf("points", TestAccuracyRow)
TIMES_TO_ACCURACY = TableOf("reached", TimeToAccuracyRow)
TRAININGS = TableOf("training", Budget, optional=True)  # of trainings that are compared
CHECKS = TableOf("checks", CheckRow, optional=True)  # these three of --check alone
LAYERS = TableOf("layers", LayerRow, optional=True)
AUGMENTATION = TableOf("augmentation", AugmentationRow, optional=True)
BATCH_LOSSES = TableOf("batch_losses", BatchLossRow, optional=True)
CONFUSION = ArraysOf("confusion", ConfusionArrays)
FIRST_BATCH = ArraysOf("first_batch", FirstBatchArrays)

ACCURACY = MetricName("accuracy/{model}")
BEST_ACCURACY = MetricName("best_accuracy/{model}")
SECONDS = MetricName("training_seconds/{model}")
IMAGES_PER_SECOND = MetricName("images_per_second/{model}")
EPOCH_SECONDS = MetricName("seconds_per_epoch/{model}")
AGREEMENT = MetricName("agreement_with_teacher/{model}")
GAP = MetricName("generalisation_gap/{model}")  # accuracy on training minus test images, points
GAIN = MetricName("last_epochs_gain/{model}")  # of test accuracy, over the last tenth of the epochs, points
DIFFERENCE = MetricName("accuracy_difference/{first}/{second}")
FAILED_CHECKS = MetricName("failed_checks/{model}")
INITIAL_LOSS = MetricName("initial_loss/{model}")  # nats, before the first step
CONSTANT_LOSS = MetricName("constant_loss/{model}")  # nats, of the best constant prediction on the one batch
BATCH_LOSS = MetricName("one_batch_loss/{model}")  # nats, at the end of the training on one batch

TABLES: Final[tuple[TableOf[Any], ...]] = (
    HISTORY, CLASSES, IMAGES, RECIPE, COMPUTED, FINE_TUNED, DISTILLATION, STUDENT_AND_TEACHER, PAIRS, TEST_ACCURACIES,
    TIMES_TO_ACCURACY, TRAININGS, CHECKS, LAYERS, BATCH_LOSSES, AUGMENTATION,
)  # fmt: skip
RECORD = Contents(
    metrics=(
        ACCURACY,
        BEST_ACCURACY,
        SECONDS,
        IMAGES_PER_SECOND,
        EPOCH_SECONDS,
        AGREEMENT,
        GAP,
        GAIN,
        DIFFERENCE,
        FAILED_CHECKS,
        INITIAL_LOSS,
        BATCH_LOSS,
        CONSTANT_LOSS,
    ),
    tables=TABLES,
    arrays=(CONFUSION, FIRST_BATCH, TRAINING_IMAGES),
)
