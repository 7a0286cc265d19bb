"""Calibration of models on labelled images: rows, the judgement and the figure; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.record import by, col
from vitlens.report.claims import Claim, judge
from vitlens.report.prose import say
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.analysis.answers.evaluate import CalibrationBins


@dataclass(frozen=True)
class CalibrationRow:
    """One bin of the reliability diagram: mean confidence and accuracy of its images."""

    model: str = col("model")
    confidence: float = col("mean confidence", unit="fraction")
    accuracy: float = col("accuracy", unit="fraction")
    count: int = col("images")


FEW: Final = 30  # images below which an accuracy, of a model or of a bin, is not judged
DRAWN: Final = 100  # images from which on accuracy by confidence is drawn
ENOUGH: Final = 300  # images from which on a calibration error in 15 bins is judged
MODELS: Final = 3  # that are drawn


def calibration_rows(model: str, bins: "CalibrationBins") -> Iterator[CalibrationRow]:
    """The bins of one model."""
    for confidence, accuracy, count in zip(bins.confidence.tolist(), bins.accuracy.tolist(), bins.count.tolist()):
        yield CalibrationRow(model, confidence, accuracy, count)


def calibration_claim(model: str, error: Estimate) -> Claim:
    """The judgement of a model's expected calibration error; inconclusive for fewer than ENOUGH images."""
    if (error.n or 0) >= ENOUGH:
        return judge("calibration", model, error, "calibration", because="expected calibration error")
    because = say("expected calibration error of fewer than {{ n }} images, which bins bias upwards", n=ENOUGH)
    return Claim("calibration", model, state="inconclusive", limit="calibration", because=because)


def _reliability(rows: Sequence[Any], _: str) -> "Figure":
    from vitlens.figures.calibration import Calibration, reliability_diagram

    (record,) = rows
    errors = {row.model: row.calibration_error.value for row in record.scores}
    models = []
    for alias, own in list(by(record.calibration, "model").items())[:MODELS]:
        confidence, accuracy = (np.array([getattr(row, name) for row in own]) for name in ("confidence", "accuracy"))
        counts = np.array([row.count for row in own], float)
        models.append(Calibration(alias, confidence, accuracy, counts, error=errors[alias]))
    return reliability_diagram(models=models, few=FEW)


RELIABILITY: Final = Chart(
    "calibration",
    _reliability,
    "Accuracy against confidence in bins, with the share of images below; bars under the dashed line are "
    "overconfident, hollow ones hold few images.",
    title="Accuracy against confidence",
    rows=lambda record: [record] if record.images >= DRAWN else [],
)
