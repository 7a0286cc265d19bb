"""Calibration of models on labelled images: rows, the judgement and the chart; free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vitlens.record import col
from vitlens.report.claims import SMALLEST, Claim, judge, unjudged
from vitlens.report.numbers import number
from vitlens.report.prose import Marked, finalize, listed, say
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate, wilson

FEW: Final = 30  # images below which an accuracy, of a model or of a bin, is not judged
ENOUGH: Final = 300  # images from which on a calibration error in 15 bins is judged
DRAWN: Final = 100  # images from which on accuracy by confidence is drawn
_MOST_MODELS: Final = 3  # models in one chart


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
        gap = f"{number(points, 1)} points"
        if len(scores) > 1:
            gap += f" for **{finalize(score.model)}**"
        gaps.append(gap)
    overconfident = []
    for score in scores:
        low = score.confidence_gap.low
        # a gap without an interval is not shown to differ from 0
        if low is not None and 100 * low >= SMALLEST:
            overconfident.append(score.model)
    return say(
        "{{ verdict }}: confidence and accuracy differ by {{ gaps }}{% if overconfident %} "
        "({{ overconfident }} too confident){% endif %}.",
        verdict=Marked(_calibrated_words(states)),
        gaps=listed(gaps),
        overconfident=Marked(_overconfident_words(overconfident, model_count=len(scores))),
    )


def _overconfident_words(models: Sequence[str], *, model_count: int) -> str:
    """Return these models as the subject of "too confident", "" for none.

    model_count: how many models were judged.
    """
    if not models:
        return ""
    if model_count == 1:
        return "it is"
    if len(models) == model_count == 2:
        return "both"
    return say("{{ names|names }}", names=models)


def _calibrated_words(states: Mapping[str, str]) -> str:
    """Return which models are calibrated, the beginning of a sentence.

    states: the state of the calibration claim ("pass", "warn", "fail") by model.
    """
    is_single = len(states) == 1
    failing = [model for model, state in states.items() if state == "fail"]
    if not failing:
        nearly = "nearly " if "warn" in states.values() else ""
        if is_single:
            return f"Its confidence is {nearly}calibrated"
        all_models = "Both" if len(states) == 2 else f"All {len(states)} models"
        return f"{all_models} are {nearly}calibrated"
    if len(failing) < len(states):
        return say("{{ names|names }} {{ names|are }} not calibrated", names=failing)
    if is_single:
        return "Its confidence is not calibrated"
    return f"{'Neither' if len(states) == 2 else 'None'} is calibrated"


@dataclass(frozen=True)
class _Bin:
    """A filled bin as it is drawn, with the interval of its accuracy."""

    model: str
    confidence: float = col("mean confidence", unit="fraction")
    accuracy: Estimate = col("accuracy")


def _bins(record: Any) -> list[_Bin]:
    """Return the filled bins of the first models; none if there are too few images."""
    if record.images < DRAWN:
        return []
    errors = {row.model: row.calibration_error.value for row in record.scores}
    models = list(errors)[:_MOST_MODELS]
    bins = []
    for row in record.calibration:
        if not row.count or row.model not in models:
            continue
        correct_count = round(row.accuracy * row.count)
        accuracy = wilson(correct_count, row.count, independent=row.sources)
        label = f"{row.model}: ECE {100 * errors[row.model]:.1f} points"
        bins.append(_Bin(label, row.confidence, accuracy))
    return bins


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
