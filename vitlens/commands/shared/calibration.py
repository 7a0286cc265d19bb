"""Calibration of models on labelled images: rows, the judgement and the chart; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vitlens.record import OfModel, col
from vitlens.report.claims import Claim, judge, unjudged
from vitlens.report.prose import say
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate, wilson

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CalibrationRow(OfModel):
    """One bin of the reliability diagram: mean confidence and accuracy of its images."""

    confidence: float = col("mean confidence", unit="fraction")
    accuracy: float = col("accuracy", unit="fraction")
    count: int = col("images")
    sources: int | None = col("independent images", default=None)  # where several images show one source


FEW: Final = 30  # images below which an accuracy, of a model or of a bin, is not judged
DRAWN: Final = 100  # images from which on accuracy by confidence is drawn
ENOUGH: Final = 300  # images from which on a calibration error in 15 bins is judged
MODELS: Final = 3  # that are drawn


def calibration_rows(model: str, bins: Sequence["Tensor"]) -> Iterator[CalibrationRow]:
    """Return the bins of one model from their confidence, accuracy, number of images and number of sources."""
    return (CalibrationRow(model, *own) for own in zip(*(each.tolist() for each in bins)))


def calibration_claim(model: str, error: Estimate) -> Claim:
    """Return the judgement of a model's expected calibration error; inconclusive for fewer than ENOUGH images."""
    if (error.n or 0) >= ENOUGH:
        return judge("calibration", model, error, "calibration", because="expected calibration error")
    because = say("expected calibration error of fewer than {{ n }} images, which bins bias upwards", n=ENOUGH)
    return unjudged("calibration", model, because, limit="calibration")


@dataclass(frozen=True)
class _Bin:
    """A filled bin as it is drawn, with the interval of its accuracy."""

    model: str
    confidence: float = col("mean confidence", unit="fraction")
    accuracy: Estimate = col("accuracy")


def _bins(record: Any) -> list[_Bin]:
    """Return the filled bins of the first models; none of few images."""
    errors = {row.model: row.calibration_error.value for row in record.scores}
    return [
        _Bin(
            f"{row.model}: ECE {100 * errors[row.model]:.1f} points",
            row.confidence,
            wilson(round(row.accuracy * row.count), row.count, independent=row.sources),
        )
        for row in record.calibration
        if row.count and record.images >= DRAWN and row.model in list(errors)[:MODELS]
    ]


def reliability() -> Chart:
    """Accuracy against confidence of the first models, where there are enough images."""
    from vitlens.charts import scatter

    return Chart(
        "calibration",
        scatter("confidence", "accuracy", of="model"),
        "Accuracy against confidence in bins, with 95 % intervals; below the dashed line the model is overconfident. "
        "Bins with few images have wide intervals.",
        title="Accuracy against confidence",
        rows=_bins,
    )
