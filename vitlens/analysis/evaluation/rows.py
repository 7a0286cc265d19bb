"""Rows about predictions on labelled images; free of torch."""

from dataclasses import dataclass

from vitlens.record import OfModel, col
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ClassRow(OfModel):
    """One class of the data, for one model. accuracy: None if the class has no images."""

    class_name: str = col("class")
    n: int = col("images")
    accuracy: Estimate | None = col("accuracy", default=None)


@dataclass(frozen=True)
class ConfusionRow(OfModel):
    """Number of images of one class that one model takes for another; only cells that are not 0."""

    truth: str = col("class")
    prediction: str = col("prediction")
    count: int = col("images")


@dataclass(frozen=True)
class CalibrationRow(OfModel):
    """One bin of the reliability diagram: mean confidence and accuracy of its images."""

    confidence: float = col("mean confidence", unit="fraction")
    accuracy: float = col("accuracy", unit="fraction")
    count: int = col("images")
    # where several images are of one source
    sources: int | None = col("independent images", default=None)
