"""The report of `vitlens evaluate`: accuracy, errors and calibration."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.charts import Picture, images
from vitlens.commands.evaluate.record import (
    EvaluateRecord,
    PredictedClassRow,
    PredictionArrays,
    ScoreRow,
)
from vitlens.commands.shared.calibration import ENOUGH, FEW, calibration_claim, reliability
from vitlens.commands.shared.comparison import (
    SECTION,
    accuracy_claims,
    accuracy_effects,
    not_equal,
    too_few_images,
    which_is_better,
)
from vitlens.commands.shared.saturation import is_saturated, saturated_words
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import class_sections, worst_class
from vitlens.report.claims import FEWEST, FOUND, SMALLEST, Claim, clear, found
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Glance, Report, Rows, Section, rows_of
from vitlens.uncertainty import Estimate

_PICTURED: Final = 3  # models whose predictions are drawn, at most
_ERRORS_OF_ONE: Final = 12  # pictures of errors of a single model, as many as DRAWN_ERRORS
_ERRORS_A_ROW: Final = 6  # pictures of errors of each of several models, in one row


def claims(record: EvaluateRecord) -> Iterator[Claim]:
    """Yield which model is better, the judgements of each model, and where its confidence or its
    classes are worst.
    """
    accuracies = {score.model: score.accuracy for score in record.scores}
    has_enough_images = record.images >= FEW
    if len(accuracies) > 1:
        if has_enough_images:
            yield from which_is_better(accuracies, record.pairs)
        yield from accuracy_claims(accuracies, record.pairs)
    elif has_enough_images:
        yield _accuracy(record)
    for score in record.scores:
        yield calibration_claim(score.model, score.calibration_error)
        yield from _confidence(record, score)
        yield from worst_class(score.model, record.per_class, score.accuracy)


def _accuracy(record: EvaluateRecord) -> Claim:
    """State the accuracy of the only model."""
    (score,) = record.scores
    brief = "Of {{ n }} images, **{{ model }}** classifies {{ effect|alone }} correctly."
    if score.candidates:  # zero-shot accuracy means nothing without the number of classes
        brief = ""
    return found(
        "top-1 accuracy",
        score.model,
        "**{{ model }}** classifies {{ effect }} of the images correctly"
        "{% if classes %}, zero-shot among {{ classes }} classes "
        "({{ (1 / classes)|percent(1) }} by chance){% endif %}.",
        score.accuracy,
        brief=brief,
        headline="{{ model }} classifies {{ correct }} of {{ n }} images correctly",
        kind="answer",
        given={
            "model": score.model,
            "n": record.images,
            "correct": record.images - record.errors,
            "classes": score.candidates,
        },
    )


def miscalibrated_rows(rows: Sequence[PredictedClassRow]) -> list[PredictedClassRow]:
    """Return the predicted classes whose confidence differs from their accuracy, after correction
    for their number.

    Classes with few images are left out. The class with the most images predicted too confidently,
    or too cautiously, comes first.
    """
    significant = []
    for row in rows:
        is_large = 100 * abs(row.gap.value) >= SMALLEST and clear(row.gap, 0.0)
        is_significant = row.n >= FEWEST and row.p_holm <= FOUND
        if is_significant and is_large:
            significant.append(row)
    return sorted(significant, key=lambda row: -abs(row.gap.value) * row.n)


def _direction(gap: Estimate) -> str:
    return "overconfident" if gap.value > 0 else "underconfident"


def _confidence(record: EvaluateRecord, score: ScoreRow) -> Iterator[Claim]:
    """Yield the predicted class whose confidence misleads most.

    If the confidence of no class misleads, or of half of the classes or more, the claim is about
    all images.
    """
    rows = [row for row in record.by_prediction if row.model == score.model]
    miscalibrated = miscalibrated_rows(rows)
    gap = score.confidence_gap
    is_large = 100 * abs(gap.value) >= SMALLEST and clear(gap, 0.0)
    is_minority = 0 < len(miscalibrated) < len(rows) / 2
    if is_minority:
        worst = miscalibrated[0]
        yield found(
            "confidence by class",
            score.model,
            "**{{ row.model }}** is {{ direction }} where it predicts class "
            "{{ row.class_name }}: mean confidence {{ row.confidence|percent(1) }}, accuracy "
            "{{ row.accuracy|percent(1) }} of {{ row.n }} images.{% if wrong > 1 %} Confidence "
            "differs from accuracy in {{ wrong }} of {{ classes }} predicted classes.{% endif %}",
            worst.gap,
            given={
                "row": worst,
                "direction": _direction(worst.gap),
                "classes": len(rows),
                "wrong": len(miscalibrated),
            },
            kind="hidden fault",
            p=worst.p_holm,
            place="calibration",
        )
    elif (gap.n or 0) >= ENOUGH and is_large:
        yield found(
            "confidence",
            score.model,
            "**{{ model }}** is {{ direction }}: mean confidence minus accuracy is "
            "{{ effect|points }}.",
            gap,
            given={"model": score.model, "direction": _direction(gap)},
            kind="hidden fault",
            place="calibration",
        )


def unknown(record: EvaluateRecord) -> Iterator[str]:
    """Yield what could overturn these numbers, the most serious first."""
    n = record.images
    yield from too_few_images(record.scores, n, "to judge a model")
    saturated = _saturated_counts(record)
    if saturated:
        yield saturated_words(saturated, "calibration by class and confusions")
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    yield say(
        "The images are a sample of {{ n }}, and each model was trained once: other data or "
        "another seed may give {{ 'another order' if pairs else 'another accuracy' }}.",
        n=n,
        pairs=record.pairs,
    )


def _saturated_counts(record: EvaluateRecord) -> dict[str, int]:
    """Return the number of errors of each model with too few errors, or too low a loss, to explain
    them.
    """
    if record.images < FEWEST:
        return {}
    errors = Counter[str]()
    for row in record.confusion:
        if row.truth != row.prediction:
            errors[row.model] += row.count
    saturated = {}
    for score in record.scores:
        count = errors[score.model]
        if is_saturated(count, score.cross_entropy.value):
            saturated[score.model] = count
    return saturated


def _without_saturated(rows: Rows) -> Callable[[EvaluateRecord], list[Any]]:
    """Return a function that gives the rows of a section without those of saturated models."""

    def explained(record: EvaluateRecord) -> list[Any]:
        saturated = _saturated_counts(record)
        return [row for row in rows_of(rows, record) if row.model not in saturated]

    return explained


def _picture(
    arrays: PredictionArrays, index: int, pixels: NDArray[np.uint8], *, row: str
) -> Picture:
    """Return an image with its prediction and its label; index: its place among the images."""
    return Picture.predicted(
        pixels / np.float32(255),
        str(arrays.classes[arrays.prediction[index]]),
        float(arrays.probability[index]),
        str(arrays.classes[arrays.label[index]]),
        row=row,
    )


def _errors(record: EvaluateRecord) -> list[Picture]:
    """Return the errors with the highest confidence, one row of pictures for each of several
    models.
    """
    aliases = [alias for alias in record.aliases[:_PICTURED] if alias in record.predictions]
    is_single = len(aliases) == 1
    most = _ERRORS_OF_ONE if is_single else _ERRORS_A_ROW
    pictures = []
    for alias in aliases:
        arrays = record.predictions[alias]
        errors = arrays.surest_errors[:most]
        row = "" if is_single else alias
        for index, pixels in zip(errors, arrays.surest_errors_pixels):
            pictures.append(_picture(arrays, index, pixels, row=row))
    return pictures


def _sampled_pictures(record: EvaluateRecord) -> list[Picture]:
    """Return the predictions drawn by the seed: a row of right ones and a row of wrong ones for
    each model.
    """
    aliases = [alias for alias in record.aliases[:_PICTURED] if alias in record.predictions]
    pictures = []
    for alias in aliases:
        arrays = record.predictions[alias]
        if arrays.sampled is None or arrays.sampled_pixels is None:
            continue
        for index, pixels in zip(arrays.sampled, arrays.sampled_pixels):
            is_right = arrays.prediction[index] == arrays.label[index]
            row = "right" if is_right else "wrong"
            if len(aliases) > 1:
                row = f"{alias}: {row}"
            pictures.append(_picture(arrays, index, pixels, row=row))
    return pictures


_confidence_rows: Final = _without_saturated("by_prediction")


def _confidence_section(record: EvaluateRecord) -> Sequence[PredictedClassRow]:
    """Return the predicted classes of the section, none for few images."""
    if record.images < FEWEST:
        return ()
    return _confidence_rows(record)


def _confidence_opening(record: EvaluateRecord) -> str:
    rows = [row for row in _confidence_rows(record) if row.n >= FEWEST]
    return say(
        "{% if wrong %}Confidence differs from accuracy in {{ wrong }} of {{ n }} "
        "predicted classes with at least {{ few }} images.{% elif n %}No predicted "
        "class is measurably over- or underconfident.{% else %}No class is predicted "
        "for the {{ few }} images that judging its confidence takes.{% endif %}",
        wrong=len(miscalibrated_rows(rows)),
        n=len(rows),
        few=FEWEST,
    )


def _accuracy_difference(record: EvaluateRecord) -> Estimate | None:
    """Return the difference of the only two models; None for another number of models."""
    if len(record.pairs) != 1:
        return None
    return record.pairs[0].difference


def _class_sections() -> Iterator[Section]:
    """Yield the sections about classes, without the rows of saturated models."""
    for section in class_sections():
        yield replace(section, rows=_without_saturated(section.rows))


REPORT: Final = Report(
    EvaluateRecord,
    claims=claims,
    effects=lambda record: accuracy_effects(record.pairs),
    unknown=unknown,
    title="Accuracy of {{ record.aliases|join(', ') }}",
    picture=Chart(
        "surest_errors",
        images(),
        "The {{ rows|length }} error{{ rows|s }} with the highest confidence among "
        "{{ record.images }} image{{ record.images|s }}, with the true class below. They are the "
        "worst errors, not typical ones, and labels may be wrong.",
        title="Errors with the highest confidence",
        rows=_errors,
    ),
    glance=(
        Glance(
            "scores",
            "accuracy",
            question="accuracy",
            difference=_accuracy_difference,
        ),
        Glance("scores", "top5"),
        Glance("scores", "candidates"),
        Glance("scores", "chance"),
        Glance("scores", "cross_entropy"),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("scores", "confidence_gap"),
    ),
    sections=(
        SECTION,
        *_class_sections(),
        Section(
            "What do right and wrong predictions look like?",
            _sampled_pictures,
            charts=(
                Chart(
                    "predictions",
                    images(),
                    "Right and wrong predictions with their confidence, drawn at random (seed "
                    "{{ record.config.seed }}) in equal numbers if possible. The shares do not "
                    "show the accuracy.",
                    title="Right and wrong predictions",
                ),
            ),
        ),
        Section(
            "Is the confidence right?",
            _confidence_section,
            opening=_confidence_opening,
            about=("calibration",),
            order=lambda row: (row.p_holm, row.p),
            columns=("model", "class_name", "confidence", "accuracy", "gap", "p_holm"),
            charts=(reliability(),),
        ),
    ),
)
