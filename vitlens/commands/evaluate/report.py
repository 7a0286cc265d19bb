"""The report of `vitlens evaluate`: how accurate models are, where they err, and whether their confidence is right."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture, images
from vitlens.commands.evaluate.record import EvaluateRecord, PredictedClassRow, ScoreRow
from vitlens.commands.shared.calibration import ENOUGH, FEW, calibration_claim, reliability
from vitlens.commands.shared.comparison import SECTION, accuracy_claims, accuracy_effects, not_equal, which_is_better
from vitlens.commands.shared.saturation import is_saturated, saturated_words
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import class_sections, worst_class
from vitlens.report.claims import FEWEST, FOUND, SMALLEST, Claim, clear, found
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Glance, Report, Rows, Section, rows_of
from vitlens.uncertainty import Estimate

_PICTURED: Final = 3  # models


def claims(record: EvaluateRecord) -> Iterator[Claim]:
    """Yield which model is better, what is judged of each, and where its confidence and its classes are worst."""
    accuracies = {score.model: score.accuracy for score in record.scores}
    if len(accuracies) > 1:
        yield from which_is_better(accuracies, record.pairs) if record.images >= FEW else ()
        yield from accuracy_claims(accuracies, record.pairs)
    elif record.images >= FEW:
        top = record.scores[0]
        yield found(
            "top-1 accuracy",
            top.model,
            "**{{ model }}** classifies {{ effect }} of the images "
            "correctly{% if classes %}, zero-shot among {{ classes }} classes ({{ (1 / classes)|percent(1) }} by "
            "chance){% endif %}.",
            top.accuracy,
            headline="{{ model }} classifies {{ right }} of {{ n }} images correctly",
            kind="answer",
            given={
                "model": top.model,
                "n": record.images,
                "right": record.images - record.errors,
                "classes": top.candidates,
            },
        )
    for score in record.scores:
        yield calibration_claim(score.model, score.calibration_error)
        yield from _confidence(record, score)
        yield from worst_class(score.model, record.per_class, score.accuracy)


def misjudged(rows: Sequence[PredictedClassRow]) -> list[PredictedClassRow]:
    """Return the predicted classes, of enough images, whose confidence differs from their accuracy, also after the
    correction for their number, those with the most images too few or too many correct first."""
    known = [r for r in rows if r.n >= FEWEST and r.p_holm <= FOUND and 100 * abs(r.gap.value) >= SMALLEST]
    return sorted((row for row in known if clear(row.gap, 0.0)), key=lambda row: -abs(row.gap.value) * row.n)


def _leans(gap: Estimate) -> str:
    return "overconfident" if gap.value > 0 else "underconfident"


def _confidence(record: EvaluateRecord, score: ScoreRow) -> Iterator[Claim]:
    """Yield the predicted class whose confidence misleads most; where that is not so of a minority of them, all
    images."""
    rows = [row for row in record.by_prediction if row.model == score.model]
    leaning = misjudged(rows)
    gap = score.confidence_gap
    if 0 < 2 * len(leaning) < len(rows):
        row = leaning[0]
        yield found(
            "confidence by class",
            score.model,
            "**{{ row.model }}** is {{ leans }} where it predicts class {{ row.class_name }}: mean confidence "
            "{{ row.confidence|percent(1) }}, accuracy {{ row.accuracy|percent(1) }} of {{ row.n }} images"
            "{% if leaning|length > 1 %}; {{ leaning|length }} of {{ rows|length }} predicted classes differ like this"
            "{% endif %}.",
            row.gap,
            given={"row": row, "leans": _leans(row.gap), "rows": rows, "leaning": leaning},
            kind="hidden fault",
            p=row.p_holm,
            place="calibration",
        )
    elif (gap.n or 0) >= ENOUGH and 100 * abs(gap.value) >= SMALLEST and clear(gap, 0.0):
        yield found(
            "confidence",
            score.model,
            "**{{ model }}** is {{ leans }}: mean confidence minus accuracy is {{ effect|points }}.",
            gap,
            given={"model": score.model, "leans": _leans(gap)},
            kind="hidden fault",
            place="calibration",
        )


def unknown(record: EvaluateRecord) -> Iterator[str]:
    """Yield what could overturn these numbers, the most serious first."""
    n = record.images
    if n < FEW:
        scores = listed([say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in record.scores])
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few to judge a model: {{ scores }}.", n=n, scores=scores)
    if saturated := _saturated(record):
        yield saturated_words(saturated, "calibration by class and confusions")
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    yield say(
        "The images are a sample of {{ n }}, and of each model one training was evaluated: other data or another seed "
        "may give {{ 'another order' if pairs else 'another accuracy' }}.",
        n=n,
        pairs=record.pairs,
    )


def _saturated(record: EvaluateRecord) -> dict[str, int]:
    """Return the number of errors of each model that makes too few, or loses too little, to explain them."""
    found = {}
    for score in record.scores:
        wrong = [row.count for row in record.confusion if row.model == score.model and row.truth != row.prediction]
        if record.images >= FEWEST and is_saturated(sum(wrong), score.cross_entropy.value):
            found[score.model] = sum(wrong)
    return found


def _of_explained(rows: Rows) -> Callable[[EvaluateRecord], list[Any]]:
    """Return the rows of a section, of models that are not saturated."""

    def chosen(record: EvaluateRecord) -> list[Any]:
        saturated = _saturated(record)
        return [row for row in rows_of(rows, record) if row.model not in saturated]

    return chosen


def _errors(record: EvaluateRecord) -> list[Picture]:
    """Return the errors with the highest confidence, of several models a row each."""
    known = {alias: record.predictions[alias] for alias in record.aliases[:_PICTURED] if alias in record.predictions}
    return [
        Picture.predicted(
            pixels / np.float32(255),
            str(own.classes[own.prediction[at]]),
            float(own.probability[at]),
            str(own.classes[own.label[at]]),
            row=alias if len(known) > 1 else "",
        )
        for alias, own in known.items()
        for at, pixels in list(zip(own.surest_errors, own.surest_errors_pixels))[: 12 if len(known) == 1 else 6]
    ]


def _leaning(record: EvaluateRecord) -> str:
    rows = [row for row in _of_explained("by_prediction")(record) if row.n >= FEWEST]
    return say(
        "{% if k %}Confidence differs from accuracy in {{ k }} of {{ n }} predicted classes with at least {{ few }} "
        "images.{% elif n %}No predicted class is measurably over- or underconfident.{% else %}"
        "No class is predicted for {{ few }} images, enough to judge its confidence."
        "{% endif %}",
        k=len(misjudged(rows)),
        n=len(rows),
        few=FEWEST,
    )


REPORT: Final = Report(
    EvaluateRecord,
    claims=claims,
    effects=lambda record: accuracy_effects(record.pairs),
    unknown=unknown,
    title="Accuracy of {{ record.aliases|join(', ') }}",
    picture=Chart(
        "surest_errors",
        images(),
        "Errors, {{ rows|length }} on {{ record.images }} image{{ record.images|s }}, those with the highest "
        "confidence, highest first, with the true class below: the worst, not typical ones. Labels may be wrong.",
        title="Errors with the highest confidence",
        rows=_errors,
    ),
    glance=(
        Glance(
            "scores",
            "accuracy",
            question="accuracy",
            difference=lambda record: record.pairs[0].difference if len(record.pairs) == 1 else None,
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
        *(replace(section, rows=_of_explained(section.rows)) for section in class_sections()),
        Section(
            "Is the confidence right?",
            lambda record: _of_explained("by_prediction")(record) if record.images >= FEWEST else (),
            opening=_leaning,
            about=("calibration",),
            order=lambda row: (row.p_holm, row.p),
            columns=("model", "class_name", "n", "confidence", "accuracy", "gap"),
            charts=(reliability(),),
        ),
    ),
)
