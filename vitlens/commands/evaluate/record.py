"""The record of `vitlens evaluate`."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.analysis.evaluation.rows import CalibrationRow, ClassRow, ConfusionRow
from vitlens.arrays import Indices, Pixels, Vector, Words
from vitlens.commands.shared.comparison import PairRow
from vitlens.commands.shared.planted import FactorRow
from vitlens.commands.shared.trainings import Budget
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ScoreRow(OfModel):
    """One model on all images.

    top5: None for fewer than 20 classes.
    candidates, chance: the number of classes and the accuracy of guessing, for a zero-shot model.
    """

    accuracy: Estimate = col(
        "top-1 accuracy", better="higher", metric="accuracy/{model}", share=True
    )
    cross_entropy: Estimate = col("cross-entropy", better="lower", metric="cross_entropy/{model}")
    calibration_error: Estimate = col(
        "calibration error",
        better="lower",
        metric="calibration_error/{model}",
        share=True,
        term="the mean difference of confidence and accuracy over bins of confidence, weighted by "
        "their images",
    )
    confidence_gap: Estimate = col(
        "confidence minus accuracy", unit="points", metric="confidence_gap/{model}"
    )
    top5: Estimate | None = col(
        "top-5 accuracy", better="higher", metric="top5_accuracy/{model}", share=True, default=None
    )
    candidates: int | None = col("classes to choose from, zero-shot", default=None)
    chance: float | None = col("accuracy by chance, zero-shot", unit="fraction", default=None)


@dataclass(frozen=True)
class PredictedClassRow(OfModel):
    """The n images that one model predicts as one class.

    gap: mean confidence minus accuracy of these predictions.
    p: the p-value of the hypothesis that each prediction is correct with the probability of its
        confidence.
    p_holm: p corrected for the number of classes of the model.
    """

    class_name: str = col("predicted class")
    n: int = col("images")
    confidence: float = col("mean confidence", unit="fraction")
    accuracy: float = col("accuracy", unit="fraction")
    gap: Estimate = col("confidence minus accuracy", unit="points")
    p: float = col("p")
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class PredictionArrays:
    """Every prediction of one model.

    classes: the names of the classes.
    label, prediction: the class of each image (images,), as indices into classes.
    probability: the confidence of each prediction (images,).
    surest_errors: the images of the errors with the highest confidence, highest first.
    surest_errors_pixels: their pixels.
    groups: the source of each image (images,), None if no images share a source.
    sampled: images with right predictions, then with wrong ones, drawn by the seed; None in folders
        of earlier versions.
    sampled_pixels: their pixels.
    """

    classes: Words
    label: Indices
    prediction: Indices
    probability: Vector
    surest_errors: Indices
    surest_errors_pixels: Pixels
    groups: Indices | None = None
    sampled: Indices | None = None
    sampled_pixels: Pixels | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateRecord(Record):
    """One model or several on the same labelled images."""

    scores: tuple[ScoreRow, ...] = table()
    per_class: tuple[ClassRow, ...] = table()
    by_prediction: tuple[PredictedClassRow, ...] = table()
    confusion: tuple[ConfusionRow, ...] = table()
    calibration: tuple[CalibrationRow, ...] = table()
    pairs: tuple[PairRow, ...] = table()
    by_factor: tuple[FactorRow, ...] = table()
    training: tuple[Budget, ...] = table()
    predictions: Mapping[str, PredictionArrays] = arrays("predictions-{model}")

    @property
    def errors(self) -> int:
        """Return the number of misclassified images, summed over the models."""
        return sum(row.count for row in self.confusion if row.truth != row.prediction)
