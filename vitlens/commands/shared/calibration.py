"""Calibration of models on labelled images, as rows and as a report's figure; free of torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.record import by, col
from vitlens.records import MetricName, Record, TableOf
from vitlens.report import verdicts as rules
from vitlens.report.document import FigureSpec, Sentence, Verdict

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


CALIBRATION: Final = TableOf("calibration", CalibrationRow)
CALIBRATION_ERROR: Final = MetricName("calibration_error/{model}")
FEW: Final = 30  # images below which an accuracy, of a model or of a bin, is not judged
DRAWN: Final = 100  # images from which on accuracy by confidence is drawn
ENOUGH: Final = 300  # images from which on a calibration error in 15 bins is judged


def calibration_rows(model: str, bins: "CalibrationBins") -> Iterator[CalibrationRow]:
    """The bins of one model."""
    for confidence, accuracy, count in zip(bins.confidence.tolist(), bins.accuracy.tolist(), bins.count.tolist()):
        yield CalibrationRow(model, confidence, accuracy, count)


def calibration_verdict(record: Record, alias: str) -> Verdict:
    """The verdict on a model's expected calibration error; inconclusive for fewer than ENOUGH images."""
    error, subject = record.metric(CALIBRATION_ERROR(model=alias)), f"calibration of {alias}"
    if (error.n or 0) < ENOUGH:
        because = f"expected calibration error of fewer than {ENOUGH} images, which 15 bins bias upwards"
        return rules.inconclusive(subject, error, rules.CALIBRATION, because)
    return rules.judged(subject, error, rules.CALIBRATION, "expected calibration error")


def reliability(record: Record) -> Iterator[FigureSpec]:
    """The reliability diagram of the models with enough images; none where no model has them."""
    if _drawn(record):
        yield FigureSpec(
            "calibration",
            "Accuracy against confidence, in 15 bins of equal width; on the dashed line accuracy equals confidence. "
            f"Hollow: a bin of fewer than {FEW} images, which shows little by itself. Below: "
            "the share of the images in each bin.",
            partial(_reliability_diagram, record),
        )


def undrawn(record: Record) -> Iterator[Sentence]:
    """That too few images are no diagram."""
    for alias in record.aliases:
        if alias not in _drawn(record):
            error = record.metric(CALIBRATION_ERROR(model=alias))
            yield Sentence(
                f"Accuracy by confidence of {alias} is not drawn: {error.n or 0} images in bins show no "
                f"calibration; it takes at least {DRAWN}.",
                (error, error.n or 0, DRAWN),
            )


def _drawn(record: Record) -> list[str]:
    """The models with enough images for a diagram."""
    return [alias for alias in record.aliases if (record.metric(CALIBRATION_ERROR(model=alias)).n or 0) >= DRAWN]


def _reliability_diagram(record: Record) -> "Figure":
    drawn = _drawn(record)
    rows = [row for row in record.rows(CALIBRATION) if row.model in drawn]
    return diagram(rows, {alias: record.metric(CALIBRATION_ERROR(model=alias)).value for alias in drawn})


def diagram(rows: Sequence[CalibrationRow], errors: Mapping[str, float]) -> "Figure":
    """The reliability diagram of models from their bins; errors: the expected calibration error of each."""
    from vitlens.figures.calibration import Calibration, reliability_diagram

    models = []
    for alias, own in by(rows, "model").items():
        confidence, accuracy = (np.array([getattr(row, name) for row in own]) for name in ("confidence", "accuracy"))
        counts = np.array([row.count for row in own], float)
        models.append(Calibration(alias, confidence, accuracy, counts, error=errors[alias]))
    return reliability_diagram(models=models, few=FEW)
