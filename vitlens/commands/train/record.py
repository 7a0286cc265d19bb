"""What `vitlens train` records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vitlens.arrays import Indices, Matrix, Pixels
from vitlens.commands.shared.comparison import PairRow
from vitlens.commands.shared.trainings import Budget, TrainingImages
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ScoreRow(OfModel):
    """One model on the test images. role: "student", "teacher", "without a teacher"; None without one.

    gap: accuracy on the training images of the last epoch, as they were augmented, minus that on the test images, a
    lower bound as the weights improve within the epoch and plain images are easier, None of mixed images; gain: of test
    accuracy over the last tenth of the epochs; confidence: the mean probability
    of the predictions; best: the highest of all epochs, chosen on the test images; agreement:
    of its predictions with the teacher's.
    """

    accuracy: Estimate = col("top-1 accuracy", better="higher", metric="accuracy/{model}")
    role: str | None = col("training", default=None)
    agreement: Estimate | None = col(
        "agreement with the teacher",
        metric="agreement_with_teacher/{model}",
        default=None,
        term="the share of test images on which a model predicts the class that the teacher predicts",
    )
    gap: Estimate | None = col(
        "training minus test accuracy",
        metric="generalisation_gap/{model}",
        better="lower",
        default=None,
        term="accuracy on the augmented training images of the last epoch minus accuracy on the test images; a lower "
        "bound of overfitting",
    )
    gain: Estimate | None = col(
        "rise at the end",
        metric="last_epochs_gain/{model}",
        default=None,
        term="the change of test accuracy over the last tenth of the epochs",
    )
    confidence: Estimate | None = col("mean confidence", default=None)
    best: Estimate | None = col("best epoch", better="higher", metric="best_accuracy/{model}", default=None)
    seconds: Estimate | None = col("time of training", better="lower", metric="training_seconds/{model}", default=None)
    images_per_second: Estimate | None = col("speed", better="higher", metric="images_per_second/{model}", default=None)


@dataclass(frozen=True)
class SetupRow:
    """How a model was trained. training, test: images; usual_*: of the recipe; chosen: whether the batch size was set
    by an option; computed: notes on precision and compilation; keep_every: epochs between copies of the weights;
    augmentation: in words, "" where images are not augmented in every step; mixed: of the `shown` first images of the
    first batch, those with a target of several classes."""

    training: int
    test: int
    batch_size: int
    learning_rate: float
    usual_batch_size: int
    usual_learning_rate: float
    chosen: bool
    computed: tuple[str, ...]
    keep_every: int | None = None
    augmentation: str = ""
    shown: int = 0
    mixed: int = 0


@dataclass(frozen=True)
class SettingRow:
    """One setting of the recipe."""

    setting: str
    value: str


@dataclass(frozen=True)
class FineTunedRow:
    """The trained model that was fine-tuned. last: how many of its last blocks were trained with the head, 0 for the
    head alone, None for all weights; trained: how many of its parameters were trained; notes: on its loading."""

    model: str
    weights: str
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

    @property
    def hard(self) -> bool:
        """Return True if the student learns the teacher's prediction alone."""
        return self.kind == "hard"


@dataclass(frozen=True)
class FeatureRow(OfModel):
    """The features of a model after so many epochs of a training without labels, of test images, see
    training/objectives/pretraining.py; None: not measured."""

    epochs: int = col("epochs", default=0)
    knn: float | None = col("k-NN accuracy", unit="fraction", better="higher", default=None)
    rank: float | None = col(
        "effective rank",
        default=None,
        term="the exponential of the entropy of the singular values of the features: how many directions they use",
    )
    spread: float | None = col(
        "spread",
        default=None,
        term="mean standard deviation of features of length 1, times the root of their number: 0 where all images have "
        "the same features, 1 where they fill all directions",
    )
    objectness: float | None = col(
        "attention on the object",
        unit="fraction",
        default=None,
        term="intersection over union of the object's mask and as large an area of the CLS attention of the last "
        "block's best head, which is chosen on other images",
    )
    teacher_entropy: float | None = col("teacher's entropy", unit="nats", default=None)
    teacher_information: float | None = col(
        "information of the teacher",
        unit="nats",
        better="higher",
        default=None,
        term="the entropy of the mean of a teacher's probabilities minus their mean entropy: 0 where it says the same "
        "of every image",
    )


@dataclass(frozen=True)
class PretrainingRow(OfModel):
    """What a training without labels came to. objective: its name; title, meaning, source: of its entry;
    learned_from: captions or images alone; knn, random: of the model and of its random weights before the training,
    None without labels; neighbours: their number, bank: training images in which they are looked for; information:
    of what a teacher says about the images."""

    objective: str = col("objective", default="")
    title: str = ""
    meaning: str = ""
    source: str = ""
    learned_from: str = ""
    settings: Mapping[str, float | int | bool | str] = field(default_factory=dict)
    loss: float = col("test loss", default=0.0)
    knn: Estimate | None = col("k-NN accuracy", better="higher", metric="knn/{model}", default=None)
    random: Estimate | None = col("with random weights", default=None)
    gain: Estimate | None = col("gain", better="higher", metric="knn_gain/{model}", default=None)
    neighbours: int = 0
    bank: int = 0
    information: Estimate | None = col(
        "information of the teacher", better="higher", metric="teacher_information/{model}", default=None
    )
    objectness: Estimate | None = col("attention on the object", metric="objectness/{model}", default=None)


@dataclass(frozen=True)
class ReconstructionArrays:
    """Test images: as given, with their masked patches in grey, and with these as a masked autoencoder reconstructs."""

    given: Pixels
    masked: Pixels
    filled: Pixels


@dataclass(frozen=True)
class FirstBatchArrays:
    """The first images of the first training batch, as given and as the model takes them; labels: of the images as
    given; targets (image, class): shares of the classes."""

    given: Pixels
    trained: Pixels
    labels: Indices
    targets: Matrix


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """scores: the trained model first; training: of trainings that are compared."""

    scores: tuple[ScoreRow, ...] = table()
    history: tuple[EpochMetrics, ...] = table()
    per_class: tuple[ClassRow, ...] = table()
    confusion: tuple[ConfusionRow, ...] = table()
    pairs: tuple[PairRow, ...] = table()
    setup: tuple[SetupRow, ...] = table()
    recipe: tuple[SettingRow, ...] = table()
    started: tuple[FineTunedRow, ...] = table()
    taught: tuple[DistillationRow, ...] = table()
    training: tuple[Budget, ...] = table()
    pretraining: tuple[PretrainingRow, ...] = table()
    by_epoch: tuple[FeatureRow, ...] = table()
    reconstructions: ReconstructionArrays | None = arrays("reconstructions")
    first_batch: FirstBatchArrays | None = arrays("first_batch")
    training_images: TrainingImages | None = arrays("training_images")


def last_tenth(history: Sequence[EpochMetrics]) -> tuple[EpochMetrics, EpochMetrics] | None:
    """Return the latest evaluation that is at least a tenth of the epochs before the last one, and the last one."""
    evaluated = [row for row in history if row.test_accuracy is not None]
    apart = max(1, len(history) // 10)
    earlier = [row for row in evaluated if evaluated[-1].epoch - row.epoch >= apart]
    return (earlier[-1], evaluated[-1]) if earlier else None
