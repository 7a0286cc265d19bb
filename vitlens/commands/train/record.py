"""The record of `vitlens train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vitlens.analysis.evaluation.rows import ClassRow, ConfusionRow
from vitlens.arrays import Indices, Matrix, Pixels
from vitlens.commands.shared.comparison import PairRow
from vitlens.commands.shared.trainings import Budget, TrainingImages
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ScoreRow(OfModel):
    """One model on the test images.

    role: "student", "teacher" or "without a teacher" in a distillation, "zero-shot" for a
        classifier by words, else None.
    gap: a lower bound of overfitting, because the weights improve within the epoch and images
        without augmentation are easier. None if the training images were mixed.
    confidence: the mean probability of the prediction.
    best: optimistic, because its epoch is chosen on the test images.
    """

    accuracy: Estimate = col(
        "top-1 accuracy", better="higher", metric="accuracy/{model}", share=True
    )
    role: str | None = col("training", default=None)
    agreement: Estimate | None = col(
        "agreement with the teacher",
        metric="agreement_with_teacher/{model}",
        share=True,
        default=None,
        term="the share of test images on which a model predicts the class that the teacher "
        "predicts",
    )
    gap: Estimate | None = col(
        "training minus test accuracy",
        metric="generalisation_gap/{model}",
        better="lower",
        default=None,
        term="accuracy on the augmented training images of the last epoch minus accuracy on the "
        "test images; a lower bound of overfitting",
    )
    gain: Estimate | None = col(
        "rise at the end",
        metric="last_epochs_gain/{model}",
        default=None,
        term="the change of test accuracy over the last tenth of the epochs",
    )
    confidence: Estimate | None = col("mean confidence", default=None)
    best: Estimate | None = col(
        "best epoch", better="higher", metric="best_accuracy/{model}", share=True, default=None
    )
    seconds: Estimate | None = col(
        "time of training", better="lower", metric="training_seconds/{model}", default=None
    )
    images_per_second: Estimate | None = col(
        "speed", better="higher", metric="images_per_second/{model}", default=None
    )


@dataclass(frozen=True)
class SetupRow:
    """Images, batches and augmentation of a training."""

    training: int  # images
    test: int  # images
    batch_size: int
    learning_rate: float
    usual_batch_size: int  # of the recipe
    usual_learning_rate: float
    chosen: bool  # True if an option set the batch size
    computed: tuple[str, ...]  # notes on precision and compilation
    keep_every: int | None = None  # epochs between copies of the weights
    augmentation: str = ""  # in words; "" for images that are not augmented in every step
    shown: int = 0  # images of the first batch
    mixed: int = 0  # those of them whose target has several classes


@dataclass(frozen=True)
class ScheduleRow:
    """The learning rate of one update.

    epochs: done after it, a fraction.
    """

    epochs: float = col("epochs")
    learning_rate: float = col("learning rate")


@dataclass(frozen=True)
class SettingRow:
    """One setting of the recipe."""

    setting: str
    value: str


@dataclass(frozen=True)
class FineTunedRow:
    """The model that was fine-tuned."""

    model: str
    weights: str
    last: int | None  # blocks that were trained with the head; 0: only the head; None: all weights
    trained: int  # parameters
    parameters: int
    notes: str  # on loading the model


@dataclass(frozen=True)
class DistillationRow:
    """The settings of a distillation."""

    teacher: str
    kind: str  # "soft" or "hard"
    weight: float  # the teacher's share of the loss
    temperature: float
    token: bool  # True if the student has a distillation token
    # views of an image with cached outputs: 1, or 2 with its mirror image; 0: outputs in every step
    forms: int

    @property
    def hard(self) -> bool:
        """Return True if the student learns only the teacher's prediction."""
        return self.kind == "hard"


@dataclass(frozen=True)
class FeatureRow(OfModel):
    """The features of test images after some epochs of a training without labels.

    See training/objectives/pretraining.py for the measures. None: not measured.
    """

    epochs: int = col("epochs", default=0)
    knn: float | None = col("k-NN accuracy", unit="fraction", better="higher", default=None)
    rank: float | None = col(
        "effective rank",
        default=None,
        term="exponential of the entropy of the features' singular values: the number of "
        "directions they use",
    )
    spread: float | None = col(
        "spread",
        default=None,
        term="mean standard deviation of unit-length features, times the square root of their "
        "number: 0 if all images have the same features, 1 if they fill all directions",
    )
    objectness: float | None = col(
        "attention on the object",
        unit="fraction",
        default=None,
        term="intersection over union of the object's mask and an equally large area of highest "
        "CLS attention, by the last block's best head, chosen on other images",
    )
    teacher_entropy: float | None = col("teacher's entropy", unit="nats", default=None)
    teacher_information: float | None = col(
        "information of the teacher",
        unit="nats",
        better="higher",
        default=None,
        term="entropy of the teacher's mean probabilities minus the mean of their entropy: 0 if "
        "its output is the same for every image",
    )


@dataclass(frozen=True)
class PretrainingRow(OfModel):
    """The result of a training without labels."""

    objective: str = col("objective", default="")
    title: str = ""  # of the objective, as its meaning and its source
    meaning: str = ""
    source: str = ""
    learned_from: str = ""  # "captions" or "images alone"
    settings: Mapping[str, float | int | bool | str] = field(default_factory=dict)
    loss: float = col("test loss", default=0.0)
    knn: Estimate | None = col(  # None without labels
        "k-NN accuracy", better="higher", metric="knn/{model}", share=True, default=None
    )
    random: Estimate | None = col("with random weights", default=None)  # before the training
    gain: Estimate | None = col("gain", better="higher", metric="knn_gain/{model}", default=None)
    neighbours: int = 0  # of k-NN
    bank: int = 0  # training images among which neighbours are searched
    information: Estimate | None = col(
        "information of the teacher",
        better="higher",
        metric="teacher_information/{model}",
        default=None,
    )
    objectness: Estimate | None = col(
        "attention on the object", metric="objectness/{model}", default=None
    )


@dataclass(frozen=True)
class ReconstructionArrays:
    """Test images of a masked autoencoder."""

    given: Pixels  # without a mask
    masked: Pixels  # masked patches grey
    filled: Pixels  # masked patches reconstructed


@dataclass(frozen=True)
class FirstBatchArrays:
    """The first images of the first training batch."""

    given: Pixels  # before augmentation
    trained: Pixels  # after augmentation and mixing
    labels: Indices  # before mixing
    targets: Matrix  # (image, class), shares of the classes


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """A training and its results."""

    scores: tuple[ScoreRow, ...] = table()  # the trained model first
    history: tuple[EpochMetrics, ...] = table()
    per_class: tuple[ClassRow, ...] = table()
    confusion: tuple[ConfusionRow, ...] = table()
    pairs: tuple[PairRow, ...] = table()
    setup: tuple[SetupRow, ...] = table()
    recipe: tuple[SettingRow, ...] = table()
    schedule: tuple[ScheduleRow, ...] = table()
    started: tuple[FineTunedRow, ...] = table()
    taught: tuple[DistillationRow, ...] = table()
    training: tuple[Budget, ...] = table()  # of the student and the model without a teacher
    pretraining: tuple[PretrainingRow, ...] = table()
    by_epoch: tuple[FeatureRow, ...] = table()
    reconstructions: ReconstructionArrays | None = arrays("reconstructions")
    first_batch: FirstBatchArrays | None = arrays("first_batch")
    training_images: TrainingImages | None = arrays("training_images")


def last_tenth(history: Sequence[EpochMetrics]) -> tuple[EpochMetrics, EpochMetrics] | None:
    """Return two evaluations, (earlier, last), at least a tenth of the epochs apart.

    The last is that of the end, the earlier the latest that is far enough before it. None without
    such an evaluation.
    """
    evaluated = [row for row in history if row.test_accuracy is not None]
    tenth = max(1, len(history) // 10)
    for earlier in reversed(evaluated):
        if evaluated[-1].epoch - earlier.epoch >= tenth:
            return earlier, evaluated[-1]
    return None
