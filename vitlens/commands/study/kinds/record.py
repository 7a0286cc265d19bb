"""The record of every `vitlens study --kind`: its design, variants, trainings, comparisons and
recipes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from vitlens.arrays import FlagMatrix
from vitlens.commands.shared.trainings import TrainingImages
from vitlens.record import Record, arrays, col, table
from vitlens.uncertainty import Estimate

# points: a training whose last quarter adds more has not levelled off
RISE: Final = 1.0
Agreement: TypeAlias = Literal["contradicts", "agrees", "undecided"]
AGREEMENTS: Final[tuple[Agreement, ...]] = get_args(Agreement)


@dataclass(frozen=True)
class DesignRow:
    """How the variants were trained.

    validation_images: held out of the training images, 0 for none.
    image_size: (height, width) in px.
    model: the model that is adapted, which has `blocks` blocks; one variant trains only the `last`
        of them.
    """

    kind: str = col("kind")
    epochs: int = col("epochs")
    seeds: int = col("seeds")
    train_images: int = col("training images")
    test_images: int = col("test images")
    classes: int = col("classes")
    image_size: tuple[int, int] = col("image size (px)")
    validation_images: int = col("validation images", default=0)
    model: str | None = col("model", default=None)
    blocks: int | None = col("blocks", default=None)
    last: int | None = col("last blocks", default=None)


@dataclass(frozen=True)
class OfVariant:
    """A row about one variant, or about a model that variants are compared with.

    words: its name in tables and figures.
    """

    label: str = col("variant")
    words: str = col("variant")

    @property
    def model(self) -> str:
        """Return the label, as the variant is the model that the row is about."""
        return self.label


@dataclass(frozen=True)
class VariantRow(OfVariant):
    """One variant: accuracy over seeds and test images, size, cost and speed.

    line: its line in the chart over the number of images.
    candidate: True if it can be chosen.
    chance: the accuracy of guessing.
    trained: parameters that are trained.
    flops: the FLOPs of the forward pass of one image.
    images_per_second, seconds: of one training, medians over seeds.
    before: seconds that its teacher was trained.
    failed: trainings whose loss became infinite, or that are not better than guessing.
    training_bytes: memory that autograd keeps for one image in a training step.
    tokens: the number of tokens of an image in the first block, prefix included.
    patch: (height, width) in px.
    grid: patches (rows, columns).
    """

    preset: str = col("preset")
    line: str = col("line")
    candidate: bool = col("candidate")
    accuracy: Estimate = col(
        "top-1 accuracy", better="higher", metric="accuracy/{label}", share=True
    )
    chance: float = col("accuracy of guessing", unit="fraction")
    train_images: int = col("training images")
    parameters: int = col("parameters")
    trained: int = col("trained parameters")
    flops: int = col(
        "FLOPs of one image",
        unit="FLOPs",
        term="counted by torch: matrix products and convolutions",
    )
    epochs: int = col("epochs")
    steps: int = col("steps")
    images_per_second: float = col("training, images/s")
    seconds: float = col("time of a training", unit="s")
    before: float = col("time of its teacher's training", unit="s", default=0.0)
    failed: int = col("failed trainings", default=0)
    training_bytes: int | None = col("training memory per image", unit="bytes", default=None)
    tokens: int | None = col("tokens", default=None)
    patch: tuple[int, int] | None = col("patch (px)", default=None)
    grid: tuple[int, int] | None = col("patches (rows, columns)", default=None)

    @property
    def costs(self) -> Mapping[str, float]:
        """Return the costs by name; the first in which two variants differ decides which of them is
        cheaper.
        """
        # A training of the variant counts as 1, and its teacher's by its seconds relative to that.
        # The seconds of two variants are not compared, as they differ by chance.
        trainings = 1.0
        if self.before:
            trainings += self.before / max(self.seconds, 1e-9)
        return {
            "training images": self.train_images,
            "operations": self.flops,
            "trained parameters": self.trained,
            "training time": trainings,
        }


@dataclass(frozen=True)
class TrialRow:
    """One training of a variant."""

    label: str = col("variant")
    seed: int = col("seed")
    accuracy: float = col("top-1 accuracy", unit="fraction")
    seconds: float = col("time", unit="s")
    images_per_second: float = col("images/s")


@dataclass(frozen=True)
class ValidationRow(OfVariant):
    """Accuracy of a variant on the validation images after an epoch, over seeds."""

    epoch: int = col("epochs")
    accuracy: Estimate = col("validation accuracy")


@dataclass(frozen=True)
class LevelRow(OfVariant):
    """Whether the training of a variant has levelled off.

    accuracy: on the validation images at the end.
    rise: what the last quarter of the training added, points.
    levelled: True if that is at most RISE points.
    """

    accuracy: Estimate = col("validation accuracy")
    rise: Estimate = col("gain in the last quarter", metric="rise/{label}")
    levelled: bool = col("levelled off")


@dataclass(frozen=True)
class FindingRow:
    """A result of the literature next to that of the study.

    expects: "higher" or "equal".
    difference: the difference of the first variant minus the second, points.
    reason: how the study differs from the paper.
    """

    words: str = col("variant")
    against_words: str = col("against")
    expects: str = col("reported")
    statement: str = col("result of the literature")
    source: str = col("source")
    difference: Estimate = col("difference here")
    p_holm: float | None = col("p (Holm)", default=None)
    agreement: Agreement = col("agreement", default="undecided")
    reason: str = col("how the study differs", default="")


@dataclass(frozen=True)
class ComparisonRow:
    """One variant minus another on the same images, in points of accuracy.

    family: one of
        "difference": between variants,
        "step": from the variant that it changes in one factor,
        "best": from the variant of the highest accuracy,
        "share": between variants with fewer images, which cannot be chosen,
        "probe_gain": between linear probes on the last layer, without a test.
    p_holm: corrected for the comparisons of its family.
    detectable: the smallest true difference that such a study detects with a probability of 80 % at
        the corrected level (None: unknown).
    winner: the one that is significantly better.
    images: training images of both, where they are on two lines of one chart.
    """

    family: str = col("family")
    label: str = col("variant")
    against: str = col("against")
    words: str = col("variant")
    against_words: str = col("against")
    difference: Estimate = col("difference", metric="{family}/{label}/{against}")
    p: float | None = col("p", default=None)
    p_holm: float | None = col(
        "p (Holm)",
        term="Welch's t test over seeds, corrected for the comparisons of its table",
        default=None,
    )
    detectable: float | None = col(
        "detectable",
        unit="points",
        term="the smallest true difference that such a study finds with a probability of 80 %",
        default=None,
    )
    winner: str | None = col("significantly better", default=None)
    images: int | None = col("training images", default=None)

    @property
    def is_on_two_lines(self) -> bool:
        """Return True if both have the same training images and are on two lines of one chart."""
        return self.images is not None


def negated(difference: Estimate) -> Estimate:
    """Return a difference with the other sign."""
    value = -difference.value
    if difference.low is None or difference.high is None:
        return replace(difference, value=value, low=None, high=None)
    return replace(difference, value=value, low=-difference.high, high=-difference.low)


@dataclass(frozen=True)
class RecipeRow:
    """The main settings of a recipe, which several variants may share; config.json has all of
    them."""

    points: str = col("points")
    optimiser: str = col("optimiser")
    learning_rate: float = col("learning rate")
    batch_size: int = col("batch size")
    epochs: int = col("epochs")
    augmentation: str = col("augmentation")
    source: str = col("source")


@dataclass(frozen=True)
class CorrectArrays:
    """Which predictions of each variant are correct.

    correct: (seeds, images), by the variant's row in the table of points.
    """

    correct: Mapping[int, FlagMatrix]


@dataclass(frozen=True, kw_only=True)
class KindRecord(Record):
    """A controlled comparison: several variants of a model, each trained with several seeds."""

    design: tuple[DesignRow, ...] = table()
    points: tuple[VariantRow, ...] = table()
    trials: tuple[TrialRow, ...] = table()
    comparisons: tuple[ComparisonRow, ...] = table()
    recipes: tuple[RecipeRow, ...] = table()
    validation: tuple[ValidationRow, ...] = table()
    levels: tuple[LevelRow, ...] = table()
    findings: tuple[FindingRow, ...] = table()
    correct: CorrectArrays | None = arrays("correct")
    training_images: TrainingImages | None = arrays("training_images")

    @property
    def command(self) -> str:
        """Return the command, which is the same for all kinds."""
        return "study"

    @property
    def candidates(self) -> list[VariantRow]:
        """Return the variants that can be chosen."""
        return [row for row in self.points if row.candidate]
