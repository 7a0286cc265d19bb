"""Rows about predictions on labelled images; free of torch."""

from dataclasses import dataclass

from vitlens.record import OfModel, col
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ClassRow(OfModel):
    """One class of the data, for one model.

    n: the number of its images.
    accuracy: the accuracy on them, None if there are none.
    """

    class_name: str = col("class")
    n: int = col("images")
    accuracy: Estimate | None = col("accuracy", default=None)


@dataclass(frozen=True)
class ConfusionRow(OfModel):
    """A cell of the confusion matrix that is not 0.

    truth, prediction: the label and the predicted class.
    count: the number of images.
    """

    truth: str = col("class")
    prediction: str = col("prediction")
    count: int = col("images")


@dataclass(frozen=True)
class CalibrationRow(OfModel):
    """One bin of the reliability diagram: mean confidence and accuracy of its images."""

    confidence: float = col("mean confidence", unit="fraction")
    accuracy: float = col("accuracy", unit="fraction")
    count: int = col("images")
    # the number of images if none share a source; None in records without it
    sources: int | None = col("independent images", default=None)
