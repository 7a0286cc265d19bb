"""What `vitlens study` records: the chapters of a whole study, or the points of a --kind and what they differ in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import FlagMatrix, Indices, Matrix, Pixels, Stack, Words
from vitlens.commands.run.chapters import Chaptered
from vitlens.commands.shared.receptive import FieldArrays, FieldRow
from vitlens.commands.shared.trainings import Budget, TrainingImages
from vitlens.record import arrays, col, head_name, table
from vitlens.uncertainty import LEVEL, Estimate

Floats: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class LeftOutRow:
    """A chapter that was left out because it needs labels and there are none."""

    chapter: str = col("chapter")


@dataclass(frozen=True)
class DesignRow:
    """How the points were trained. image_size: (height, width) in px; model: that is adapted, of `blocks` blocks, the
    last of which are trained alone in one point."""

    kind: str = col("kind")
    epochs: int = col("epochs")
    seeds: int = col("seeds")
    train_images: int = col("training images")
    test_images: int = col("test images")
    classes: int = col("classes")
    image_size: tuple[int, int] = col("image size (px)")
    model: str | None = col("model", default=None)
    blocks: int | None = col("blocks", default=None)
    last: int | None = col("last blocks", default=None)


@dataclass(frozen=True)
class OfPoint:
    """A row about one point, or about a model beside the points; words: its name in tables and figures."""

    label: str = col("variant")
    words: str = col("variant")


@dataclass(frozen=True)
class PointRow(OfPoint):
    """One point: accuracy over seeds and test images, size, cost and speed.

    line: of the chart over the number of images; chance: the accuracy of guessing; trained: parameters that are
    trained; flops: of one image's forward pass; images_per_second, seconds: of a training, medians over seeds; before:
    of the training of its teacher; training_bytes: what autograd keeps of one image in a training step; tokens: of an
    image in the first block, prefix included; patch: (height, width) in px; grid: patches (rows, columns).
    """

    preset: str = col("preset")
    line: str = col("line")
    candidate: bool = col("candidate")
    accuracy: Estimate = col("top-1 accuracy", better="higher", metric="accuracy/{label}")
    chance: float = col("accuracy of guessing", unit="fraction")
    train_images: int = col("training images")
    parameters: int = col("parameters")
    trained: int = col("trained parameters")
    flops: int = col("FLOPs of one image", unit="FLOPs", term="counted by torch: matrix products and convolutions")
    epochs: int = col("epochs")
    steps: int = col("steps")
    images_per_second: float = col("training, images/s")
    seconds: float = col("time of a training", unit="s")
    before: float = col("time of its teacher's training", unit="s", default=0.0)
    training_bytes: int | None = col("training memory per image", unit="bytes", default=None)
    tokens: int | None = col("tokens", default=None)
    patch: tuple[int, int] | None = col("patch (px)", default=None)
    grid: tuple[int, int] | None = col("patches (rows, columns)", default=None)

    @property
    def costs(self) -> Mapping[str, float]:
        """Return what it costs, by name; of two points the one with less of the first in which they differ is
        cheaper."""
        return {
            "training images": self.train_images,
            "operations": self.flops,
            "trained parameters": self.trained,
            "training time": 1 if not self.before else 1 + self.before / max(self.seconds, 1e-9),
        }


@dataclass(frozen=True)
class TrialRow:
    """One training of a point."""

    label: str = col("variant")
    seed: int = col("seed")
    accuracy: float = col("top-1 accuracy", unit="fraction")
    seconds: float = col("time", unit="s")
    images_per_second: float = col("images/s")


@dataclass(frozen=True)
class ComparisonRow:
    """A point minus another, on the same images, in points of accuracy.

    family: "difference" of points, "step" from the point that it changes, "best": from the point of the highest
    accuracy, "share": of points with fewer images, "probe_gain": of linear probes on the last layer, without a test;
    p_holm: corrected for the comparisons of its family; detectable: the least true difference that such a study finds
    with a probability of 80 % at the corrected level (None: not known); winner: which is significantly better; images:
    training images, of two lines of a chart at one number of them.
    """

    family: str = col("family")
    label: str = col("variant")
    against: str = col("against")
    words: str = col("variant")
    against_words: str = col("against")
    difference: Estimate = col("difference", metric="{family}/{label}/{against}")
    p: float | None = col("p", default=None)
    p_holm: float | None = col(
        "p (Holm)", term="Welch's t test over seeds, corrected for the comparisons of its table", default=None
    )
    detectable: float | None = col(
        "detectable",
        unit="points",
        term="the smallest true difference that such a study finds with a probability of 80 %",
        default=None,
    )
    winner: str | None = col("significantly better", default=None)
    images: int | None = col("training images", default=None)


@dataclass(frozen=True)
class RecipeRow:
    """The main settings of a recipe, which several points may share; all of them are in config.json."""

    points: str = col("points")
    optimiser: str = col("optimiser")
    learning_rate: float = col("learning rate")
    batch_size: int = col("batch size")
    epochs: int = col("epochs")
    augmentation: str = col("augmentation")
    source: str = col("source")


@dataclass(frozen=True)
class PositionRow(OfPoint):
    """How well the similarity of a point's position embeddings follows nearness, over seeds where they are learned:
    over all pairs of patches, those in one row and those in one column; before: over all pairs before training."""

    seeds: int = col("seeds")
    all: Estimate | None = col(
        "all pairs",
        term="Spearman's rank correlation of the cosine similarity of two patches' position embeddings with minus "
        "their distance: 1 where nearer patches are always more similar, 0 without such order",
        metric="positions/{label}/rank_correlation/all",
        default=None,
    )
    rows: Estimate | None = col("pairs in one row", metric="positions/{label}/rank_correlation/rows", default=None)
    columns: Estimate | None = col(
        "pairs in one column", metric="positions/{label}/rank_correlation/columns", default=None
    )
    before: float | None = col("all pairs, before training", default=None)


@dataclass(frozen=True)
class CurveRow(OfPoint):
    """One epoch of one training of a model that is adapted; epochs: done; seconds: since it began; loss: nats."""

    seed: int = col("seed")
    epochs: int = col("epoch")
    seconds: float = col("time", unit="s")
    loss: float = col("loss", unit="nats")
    accuracy: float = col("test accuracy, mean over seeds", unit="fraction")


@dataclass(frozen=True)
class ReachedRow(OfPoint):
    """When the mean test accuracy over seeds first came near the best of all points; None: never."""

    accuracy: float = col("accuracy to be reached", unit="fraction")
    epochs: int | None = col("epochs", default=None)
    seconds: float | None = col("time", unit="s", default=None)


@dataclass(frozen=True)
class MovedRow(OfPoint):
    """How far training moved the attention of all heads; between: two trainings with other seeds; beyond: heads
    whose change is larger than between seeds, by its interval's lower end."""

    moved: Estimate = col(
        "moved attention",
        term="the share of a head's attention that lies on other keys after training (total variation), mean over "
        "queries, images and seeds",
        metric="attention_moved/{label}",
    )
    heads: int = col("heads")
    between: float | None = col("between seeds", unit="fraction", default=None)
    beyond: int | None = col("heads beyond seeds", default=None)


@dataclass(frozen=True)
class HeadMovedRow(OfPoint):
    """The same for one head, with an interval over test images."""

    layer: int = col("layer")
    head: int = col("head")
    moved: Estimate = col("moved attention")
    between: float | None = col("between seeds", unit="fraction", default=None)

    name = head_name


@dataclass(frozen=True)
class ShiftRow:
    """A statistic of one head, after full training minus before, over test images and seeds; p_holm: Student's t over
    images, corrected for the heads."""

    statistic: str = col("statistic")
    layer: int = col("layer")
    head: int = col("head")
    before: float = col("before")
    change: Estimate = col("change")
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class SimilarityRow(OfPoint):
    """Linear CKA between a layer before and after training, on test images; mean over seeds of value and ends."""

    layer: int = col("layer")
    cka: Estimate = col("CKA with the layer before", term="linear CKA: 1 where features are equal up to rotation")


@dataclass(frozen=True)
class ProbeRow(OfPoint):
    """Test accuracy of a linear probe on one layer of the pretrained model, of random weights, and after training."""

    layer: int = col("layer")
    accuracy: Estimate = col("accuracy of a linear probe")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class MapRow:
    """An image whose maps are shown: its class and the predictions before (of the model's own classes) and after."""

    image: str = col("image")
    name: str = col("class")
    before: str = col("prediction before")
    after: str = col("prediction after")


@dataclass(frozen=True)
class FeatureScoreRow(OfPoint):
    """A measure of a point's frozen features, mean over seeds with Student's interval over them, and what it is above
    random weights and the supervised point; p: Welch's t over seeds, corrected for the comparisons of the measure."""

    measure: str = col("measure")
    value: Estimate = col("mean over seeds", metric="features/{label}/{measure}")
    chance: float | None = col("accuracy of guessing", unit="fraction", default=None)
    over_random: Estimate | None = col("minus random weights", default=None)
    p_random: float | None = col("p (Holm), random weights", default=None)
    over_supervised: Estimate | None = col("minus supervised", default=None)
    p_supervised: float | None = col("p (Holm), supervised", default=None)


@dataclass(frozen=True)
class FewShotRow(OfPoint):
    """Accuracy of nearest class means of a few training images a class: the mean over draws, over seeds; spread: the
    standard deviation over draws of images, mean over seeds."""

    shots: int = col("training images a class")
    accuracy: Estimate = col("accuracy of nearest class means", metric="few_shot/{label}/{shots}")
    spread: float = col("standard deviation over draws", unit="fraction")
    draws: int = col("draws")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class WordingRow(OfPoint):
    """Zero-shot accuracy by the text tower with one wording; seen: whether captions in training had it."""

    wording: str = col("wording")
    seen: bool = col("in training")
    accuracy: Estimate = col("zero-shot accuracy", metric="zero_shot/{label}/{wording}")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class ZeroShotRow(OfPoint):
    """Zero-shot accuracy over wordings: the mean, the lowest and the highest of each seed, means over seeds."""

    wordings: int = col("wordings")
    mean: Estimate = col("mean over wordings", metric="zero_shot/{label}")
    lowest: Estimate = col("lowest")
    highest: Estimate = col("highest")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class LikenessRow(OfPoint):
    """Linear CKA of two points' last layers on test images, mean over seeds; of a point with itself: of its trainings
    with different seeds (1 for one seed)."""

    against: str = col("against")
    against_words: str = col("against")
    cka: Estimate = col(
        "CKA", term="linear CKA: 1 where features are equal up to rotation", metric="cka/{label}/{against}"
    )


@dataclass(frozen=True)
class ObjectnessRow(OfPoint):
    """Intersection over union of the object and the last layer's best head, chosen on other images; means over seeds.

    shuffled: the same with maps of other images; mean_mask: of the mean mask of the other images; over_random: minus
    that of random weights, whose attention follows pixels; p: over seeds, paired (Student's t) with the baselines,
    Welch's t with random weights, each corrected for all points.
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
        return all(
            gain.value > 0 and p <= LEVEL
            for gain, p in ((self.over_shuffled, self.p_shuffled), (self.over_mean, self.p_mean))
        )

    @property
    def learned_objects(self) -> bool:
        """Return True if it is significantly above random weights, too."""
        above = self.over_random is not None and self.over_random.value > 0
        return self.finds_objects and above and self.p_random is not None and self.p_random <= LEVEL


@dataclass(frozen=True)
class SpaceArrays:
    """points: by row of the table of points, the t-SNE (images, 2) of the first seed's features; labels, classes: of
    the images."""

    points: Mapping[int, Matrix]
    labels: Indices
    classes: Words


@dataclass(frozen=True)
class CorrectArrays:
    """correct: by row of the table of points (seeds, images), whether a prediction is correct."""

    correct: Mapping[int, FlagMatrix]


@dataclass(frozen=True)
class CutArrays:
    """image: the first test image (1, 3, height, width), which is shown as the patches of each point."""

    image: Pixels


@dataclass(frozen=True)
class OrderArrays:
    """similarity: by row of the table of points, of those with position embeddings, the cosine of each pair (patches,
    patches) after the training with the first seed."""

    similarity: Mapping[int, Matrix]


@dataclass(frozen=True)
class MapArrays:
    """The images of the maps, and each map before and after: attention of the last layer, mean over heads, and rollout
    (None where the model has none)."""

    images: Pixels
    before: Stack
    after: Stack
    rollout_before: Stack | None = None
    rollout_after: Stack | None = None


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Chaptered):
    """A whole study, whose chapters are runs of other commands, or points that were trained with several seeds."""

    left_out: tuple[LeftOutRow, ...] = table()
    training: tuple[Budget, ...] = table()
    # points of a --kind
    design: tuple[DesignRow, ...] = table()
    points: tuple[PointRow, ...] = table()
    trials: tuple[TrialRow, ...] = table()
    comparisons: tuple[ComparisonRow, ...] = table()
    recipes: tuple[RecipeRow, ...] = table()
    receptive_fields: tuple[FieldRow, ...] = table()
    position_order: tuple[PositionRow, ...] = table()
    curves: tuple[CurveRow, ...] = table()
    reached: tuple[ReachedRow, ...] = table()
    moved: tuple[MovedRow, ...] = table()
    heads_moved: tuple[HeadMovedRow, ...] = table()
    head_shifts: tuple[ShiftRow, ...] = table()
    layer_similarity: tuple[SimilarityRow, ...] = table()
    probes: tuple[ProbeRow, ...] = table()
    maps: tuple[MapRow, ...] = table()
    feature_scores: tuple[FeatureScoreRow, ...] = table()
    corrupted: tuple[FeatureScoreRow, ...] = table()
    few_shot: tuple[FewShotRow, ...] = table()
    zero_shot: tuple[ZeroShotRow, ...] = table()
    wordings: tuple[WordingRow, ...] = table()
    likeness: tuple[LikenessRow, ...] = table()
    objectness: tuple[ObjectnessRow, ...] = table()
    space: SpaceArrays | None = arrays("space")
    correct: CorrectArrays | None = arrays("correct")
    cut: CutArrays | None = arrays("cut")
    field_maps: FieldArrays | None = arrays("receptive_fields")
    position_similarity: OrderArrays | None = arrays("position_similarity")
    map_arrays: MapArrays | None = arrays("maps")
    training_images: TrainingImages | None = arrays("training_images")

    @property
    def vits(self) -> tuple[str, ...]:
        """Return the models whose attention is analysed."""
        return tuple(chapter.row.alias for chapter in self.of("stats"))

    @property
    def studied(self) -> tuple[str, ...]:
        """Return all models, in the order in which they were given."""
        first = self.of("evaluate") or self.of("profile")
        return first[0].record.aliases if first else self.vits
