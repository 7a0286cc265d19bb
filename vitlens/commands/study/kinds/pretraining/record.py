"""The record of a study of training with and without labels."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.arrays import Indices, Matrix, Words
from vitlens.commands.study.kinds.record import KindRecord, OfVariant
from vitlens.record import arrays, col, table
from vitlens.uncertainty import LEVEL, Estimate


@dataclass(frozen=True)
class FeatureScoreRow(OfVariant):
    """A measure of the frozen features of a variant: mean over seeds with Student's interval over
    them.

    over_random, over_supervised: minus random weights, minus the supervised variant.
    p_random, p_supervised: Welch's t test over seeds, corrected for the comparisons of the measure.
    """

    measure: str = col("measure")
    value: Estimate = col("mean over seeds", metric="features/{label}/{measure}")
    chance: float | None = col("accuracy of guessing", unit="fraction", default=None)
    over_random: Estimate | None = col("minus random weights", default=None)
    p_random: float | None = col("p (Holm), random weights", default=None)
    over_supervised: Estimate | None = col("minus supervised", default=None)
    p_supervised: float | None = col("p (Holm), supervised", default=None)


@dataclass(frozen=True)
class FewShotRow(OfVariant):
    """Accuracy of nearest class means of a few training images per class: mean over draws, then
    over seeds.

    spread: standard deviation over draws of images, mean over seeds.
    """

    shots: int = col("training images a class")
    accuracy: Estimate = col(
        "accuracy of nearest class means", metric="few_shot/{label}/{shots}", share=True
    )
    spread: float = col("standard deviation over draws", unit="fraction")
    draws: int = col("draws")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class WordingRow(OfVariant):
    """Zero-shot accuracy by the text tower with one wording.

    seen: True if captions in training had it.
    """

    wording: str = col("wording")
    seen: bool = col("in training")
    accuracy: Estimate = col("zero-shot accuracy", metric="zero_shot/{label}/{wording}", share=True)
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class ZeroShotRow(OfVariant):
    """Zero-shot accuracy over wordings: the mean, the lowest and the highest of each seed, then
    means over seeds.
    """

    wordings: int = col("wordings")
    mean: Estimate = col("mean over wordings", metric="zero_shot/{label}", share=True)
    lowest: Estimate = col("lowest")
    highest: Estimate = col("highest")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class LikenessRow(OfVariant):
    """Linear CKA between the last layers of two variants on test images, mean over seeds.

    Of a variant with itself: between its trainings with different seeds (1 for one seed).
    """

    against: str = col("against")
    against_words: str = col("against")
    cka: Estimate = col(
        "CKA",
        term="linear CKA: 1 where features are equal up to rotation",
        metric="cka/{label}/{against}",
    )


@dataclass(frozen=True)
class ObjectnessRow(OfVariant):
    """Intersection over union of the object and the last layer's best head, chosen on other images;
    means over seeds.

    shuffled: with maps of other images.
    mean_mask: with the mean mask of the other images.
    over_shuffled, over_mean: minus each of these baselines.
    over_random: minus random weights, whose attention follows pixels.
    p_shuffled, p_mean: Student's t test paired by seed, corrected for all variants.
    p_random: Welch's t test over seeds, corrected for all variants.
    """

    images: int = col("images")
    iou: Estimate = col("IoU of the best head", unit="IoU", metric="objectness/{label}")
    shuffled: Estimate = col("of maps of other images", unit="IoU")
    mean_mask: Estimate = col("of the mean mask", unit="IoU")
    over_shuffled: Estimate = col("minus shuffled", unit="IoU")
    p_shuffled: float = col("p (Holm), shuffled")
    over_mean: Estimate = col("minus mean mask", unit="IoU")
    p_mean: float = col("p (Holm), mean mask")
    over_random: Estimate | None = col("minus random weights", unit="IoU", default=None)
    p_random: float | None = col("p (Holm), random weights", default=None)

    @property
    def finds_objects(self) -> bool:
        """Return True if it is significantly above both baselines."""
        above_shuffled = self.over_shuffled.value > 0 and self.p_shuffled <= LEVEL
        above_mean_mask = self.over_mean.value > 0 and self.p_mean <= LEVEL
        return above_shuffled and above_mean_mask

    @property
    def learned_objects(self) -> bool:
        """Return True if it is significantly above random weights, too."""
        if self.over_random is None or self.p_random is None:
            return False
        return self.finds_objects and self.over_random.value > 0 and self.p_random <= LEVEL


@dataclass(frozen=True)
class SpaceArrays:
    """The test images as points in a plane, for each variant.

    points: the t-SNE of the first seed's features (images, 2), by the variant's row in the table of
        points; variants whose features are all the same are left out.
    labels: of the images, places in `classes`.
    """

    points: Mapping[int, Matrix]
    labels: Indices
    classes: Words


@dataclass(frozen=True, kw_only=True)
class PretrainingRecord(KindRecord):
    """A comparison of objectives, by their frozen features: probes, neighbours, few images,
    objects, corruptions.
    """

    feature_scores: tuple[FeatureScoreRow, ...] = table()
    corrupted: tuple[FeatureScoreRow, ...] = table()
    few_shot: tuple[FewShotRow, ...] = table()
    zero_shot: tuple[ZeroShotRow, ...] = table()
    wordings: tuple[WordingRow, ...] = table()
    likeness: tuple[LikenessRow, ...] = table()
    objectness: tuple[ObjectnessRow, ...] = table()
    space: SpaceArrays | None = arrays("space")
