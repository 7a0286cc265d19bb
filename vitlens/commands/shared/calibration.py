"""Calibration of models on labelled images: rows, the judgement and the chart; free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vitlens.record import col
from vitlens.report.claims import SMALLEST, Claim, judge, unjudged
from vitlens.report.numbers import number
from vitlens.report.prose import Marked, finalize, listed, say
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate, wilson

if TYPE_CHECKING:
    pass


FEW: Final = 30  # images below which an accuracy, of a model or of a bin, is not judged
DRAWN: Final = 100  # images from which on accuracy by confidence is drawn
ENOUGH: Final = 300  # images from which on a calibration error in 15 bins is judged
MODELS: Final = 3  # that are drawn


def calibration_claim(model: str, error: Estimate) -> Claim:
    """Return the judgement of a model's expected calibration error; inconclusive for fewer than
    ENOUGH images.
    """
    if (error.n or 0) >= ENOUGH:
        return judge(
            "calibration", model, error, "calibration", because="expected calibration error"
        )
    because = say(
        "expected calibration error of fewer than {{ n }} images, which bins bias upwards", n=ENOUGH
    )
    return unjudged("calibration", model, because, limit="calibration")


def calibration_words(scores: Sequence[Any]) -> str:
    """Return whether models are calibrated, in one sentence.

    scores: rows with the model, its calibration error and its mean confidence minus accuracy.
    """
    states = {
        score.model: calibration_claim(score.model, score.calibration_error).state
        for score in scores
    }
    if "inconclusive" in states.values():
        n = scores[0].calibration_error.n
        return say("{{ n }} images are too few to judge calibration.", n=n)
    gaps = []
    for score in scores:
        points = 100 * score.calibration_error.value
        of = f" for **{finalize(score.model)}**" if len(scores) > 1 else ""
        gaps.append(f"{number(points, 1)} points{of}")
    leaning = [score for score in scores if 100 * (score.confidence_gap.low or 0.0) >= SMALLEST]
    return say(
        "{{ verdict }}: confidence and accuracy differ by {{ gaps }}{% if leaning %} "
        "({{ leaning }} too confident){% endif %}.",
        verdict=Marked(_calibrated_words(states)),
        gaps=listed(gaps),
        leaning=Marked(_leaning_words([score.model for score in leaning], of=len(scores))),
    )


def _leaning_words(models: Sequence[str], *, of: int) -> str:
    """Return which of several models are too confident, "" for none."""
    if not models:
        return ""
    if of == 1:
        return "it is"
    return "both" if len(models) == of == 2 else say("{{ names|names }}", names=models)


def _calibrated_words(states: Mapping[str, str]) -> str:
    """Return which models are calibrated, the beginning of a sentence."""
    is_one = len(states) == 1
    if "fail" not in states.values():
        nearly = "nearly " if "warn" in states.values() else ""
        return f"Its confidence is {nearly}calibrated" if is_one else f"Both are {nearly}calibrated"
    failing = [model for model, state in states.items() if state == "fail"]
    if len(failing) == len(states):
        return "Its confidence is not calibrated" if is_one else "Neither is calibrated"
    return say("{{ names|names }} {{ names|are }} not calibrated", names=failing)


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
    """Return the chart of accuracy against confidence of the first models with enough images."""
    from vitlens.charts import scatter

    return Chart(
        "calibration",
        scatter("confidence", "accuracy", of="model"),
        "Accuracy against confidence in bins, with 95 % intervals; below the dashed line the "
        "model is overconfident. Bins with few images have wide intervals.",
        title="Accuracy against confidence",
        rows=_bins,
    )
