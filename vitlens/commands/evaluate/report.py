"""The report of `vitlens evaluate`: how accurate models are, where they err, and whether their confidence is right."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, bars, images
from vitlens.commands.evaluate.record import ConfusionRow, EvaluateRecord, PredictedClassRow, ScoreRow
from vitlens.commands.shared.calibration import ENOUGH, FEW, RELIABILITY, calibration_claim
from vitlens.commands.shared.comparison import FEWEST, SECTION, accuracy_claims, not_equal, which_is_better
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import worst_of
from vitlens.figures.confusion import confusion_matrix
from vitlens.record import by
from vitlens.report.claims import Claim, found
from vitlens.report.findings import FOUND, SMALLEST, clear
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate

_PICTURED: Final = 3  # models


def claims(record: EvaluateRecord) -> Iterator[Claim]:
    """Which model is better, what is judged of each, and where its confidence and its classes are worst."""
    accuracies = {score.model: score.accuracy for score in record.scores}
    if len(accuracies) > 1:
        yield from which_is_better(accuracies, record.pairs) if record.images >= FEW else ()
        yield from accuracy_claims(accuracies, record.pairs)
    elif record.images >= FEW:
        yield _answer(record.scores[0], record)
    for score in record.scores:
        yield calibration_claim(score.model, score.calibration_error)
        yield from _confidence(record, score)
        own = [(row, row.accuracy) for row in record.per_class if row.model == score.model and row.n >= FEWEST]
        worst = worst_of(own, score.accuracy)
        if worst is not None:
            yield found(
                "worst class", score.model,
                "**{{ row.model }}** classifies images of class {{ row.class_name }} worst: {{ effect }}, beside "
                "{{ overall|value }} of all images.",
                replace(worst[1], n=worst[0].n), given={"row": worst[0], "overall": score.accuracy},
                reference=score.accuracy.value, place="per_class",
            )  # fmt: skip


def _answer(score: ScoreRow, record: EvaluateRecord) -> Claim:
    """The accuracy of the only model."""
    given = {"top": score, "n": record.images, "right": record.images - record.errors}
    return Claim(
        "top-1 accuracy", score.model,
        say("**{{ top.model }}** classifies {{ top.accuracy }} of the images correctly.", **given),
        title=say("{{ top.model }} classifies {{ right }} of {{ n }} images correctly", **given),
        effect=score.accuracy, kind="answer",
    )  # fmt: skip


def misjudged(rows: Sequence[PredictedClassRow]) -> list[PredictedClassRow]:
    """The predicted classes, of enough images, whose confidence differs from their accuracy, also after the correction
    for their number, those with the most images too few or too many correct first."""
    known = [r for r in rows if r.n >= FEWEST and r.p_holm <= FOUND and 100 * abs(r.gap.value) >= SMALLEST]
    return sorted((row for row in known if clear(row.gap, 0.0)), key=lambda row: -abs(row.gap.value) * row.n)


def _leans(gap: Estimate) -> str:
    return "overconfident" if gap.value > 0 else "underconfident"


def _calibrated(rows: Sequence[PredictedClassRow]) -> bool:
    """Whether these predicted classes together show neither over- nor underconfidence."""
    count = sum(row.n for row in rows)
    if not count:
        return False
    mean = sum(row.n * row.gap.value for row in rows) / count
    ends = [(row.n, row.gap.low, row.gap.high) for row in rows]
    halves = [n * (high - low) / 2 for n, low, high in ends if low is not None and high is not None]
    return abs(mean) <= max(sqrt(sum(each**2 for each in halves)) / count, SMALLEST / 100)


def _confidence(record: EvaluateRecord, score: ScoreRow) -> Iterator[Claim]:
    """The predicted class whose confidence misleads most; and over all images, unless that class explains it."""
    rows = [row for row in record.by_prediction if row.model == score.model]
    leaning = misjudged(rows)
    explained = bool(leaning) and _calibrated([row for row in rows if row not in leaning])
    if leaning:
        row = leaning[0]
        yield found(
            "confidence by class", score.model,
            "**{{ row.model }}** is {{ leans }} where it predicts class {{ row.class_name }}: mean confidence "
            "{{ row.confidence|percent(1) }}, accuracy {{ row.accuracy|percent(1) }} of {{ row.n }} images"
            "{% if several %}; {{ leaning|length }} of {{ rows|length }} predicted classes differ like this{% endif %}"
            "{% if explained %}; its other predictions together show none{% endif %}.",
            row.gap,
            given={"row": row, "leans": _leans(row.gap), "rows": rows, "leaning": leaning,
                   "several": len(leaning) > 1, "explained": explained},
            kind="hidden fault", p=row.p_holm, place="calibration",
        )  # fmt: skip
    gap = score.confidence_gap
    if not explained and (gap.n or 0) >= ENOUGH and 100 * abs(gap.value) >= SMALLEST:
        yield found(
            "confidence", score.model,
            "**{{ model }}** is {{ leans }}: mean confidence minus accuracy is {{ effect|points }}.",
            gap, given={"model": score.model, "leans": _leans(gap)}, kind="hidden fault", place="calibration",
        )  # fmt: skip


def unknown(record: EvaluateRecord) -> Iterator[str]:
    """What could overturn these numbers, the most serious first."""
    n = record.images
    if n < FEW:
        scores = listed([say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in record.scores])
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few to judge a model: {{ scores }}.", n=n, scores=scores)
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    yield say(
        "The images are a sample of {{ n }}, and of each model one training was evaluated: other data or another seed "
        "may give {{ 'another order' if pairs else 'another accuracy' }}.", n=n, pairs=record.pairs,
    )  # fmt: skip


def _errors(record: EvaluateRecord) -> list[Picture]:
    """The errors with the highest confidence, of several models a row each."""
    known = {alias: record.predictions[alias] for alias in record.aliases[:_PICTURED] if alias in record.predictions}
    return [
        Picture.predicted(
            pixels / np.float32(255), str(own.classes[own.prediction[at]]), float(own.probability[at]),
            str(own.classes[own.label[at]]), row=alias if len(known) > 1 else "",
        )
        for alias, own in known.items()
        for at, pixels in list(zip(own.surest_errors, own.surest_errors_pixels))[: 12 if len(known) == 1 else 6]
    ]  # fmt: skip


def _confusion(rows: Sequence[ConfusionRow], _: str) -> Figure:
    """The counts among classes that are a label or a prediction of at least one image."""
    names = list(dict.fromkeys([*(row.truth for row in rows), *(row.prediction for row in rows)]))
    counts = np.zeros((len(names), len(names)), np.int64)
    for row in rows:
        counts[names.index(row.truth), names.index(row.prediction)] = row.count
    return confusion_matrix(counts=counts, classes=names, model=rows[0].model)


def _confused(record: EvaluateRecord) -> list[ConfusionRow]:
    return [row for row in record.confusion if row.truth != row.prediction and record.images >= FEWEST]


def _leaning(record: EvaluateRecord) -> str:
    """In how many predicted classes of each model confidence differs from accuracy."""
    rows = by([row for row in record.by_prediction if row.n >= FEWEST], "model")
    parts = [
        say("{{ k or 'none' }} of {{ n }} of **{{ model }}**", k=len(misjudged(own)), n=len(own), model=model)
        for model, own in rows.items()
    ]
    return say(
        "{% if parts %}Of predicted classes with at least {{ n }} images, confidence differs significantly from "
        "accuracy in {{ shown }}.{% else %}No class is predicted for {{ n }} images, enough to judge its confidence."
        "{% endif %}", n=FEWEST, parts=parts, shown=listed(parts[:_PICTURED]),
    )  # fmt: skip


REPORT: Final = Report(
    EvaluateRecord,
    claims=claims,
    unknown=unknown,
    title="Accuracy of {{ record.aliases|join(', ') }}",
    picture=Chart(
        "surest_errors", images(),
        "The errors with the highest confidence, highest first, with the true class below: the worst, not typical "
        "ones. Labels may be wrong.",
        title="Errors with the highest confidence", rows=_errors,
    ),
    glance=(
        Glance("scores", "accuracy", question="accuracy", difference=lambda record: (
            record.pairs[0].difference if len(record.pairs) == 1 else None
        )),
        Glance("scores", "top5"),
        Glance("scores", "cross_entropy"),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("scores", "confidence_gap"),
    ),
    sections=(
        SECTION,
        Section(
            "Which classes are recognised worst?",
            lambda record: [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST],
            order=lambda row: row.accuracy.value,
            opening="The lowest accuracy is that of **{{ first.model }}** on class {{ first.class_name }}, "
            "{{ first.accuracy|alone }} of {{ first.n }} images; the highest is {{ rows[-1].accuracy|value }}.",
            columns=("model", "class_name", "n", "accuracy"),
            charts=(Chart(
                "per_class", bars("class_name", "accuracy", of="model"),
                "Accuracy of each class with its interval, lowest first. Where intervals overlap, classes may differ "
                "by chance.",
                title="Accuracy by class",
            ),),
        ),
        Section(
            "Which classes are confused?", _confused, order=lambda row: -row.count,
            opening="{% if first.count > 1 %}Most often **{{ first.model }}** predicts {{ first.prediction }} for "
            "{{ first.truth }}: {{ first.count }} images.{% else %}No confusion occurs twice.{% endif %}",
            columns=("model", "truth", "prediction", "count"),
            charts=(Chart(
                "confusion", _confusion,
                "Images by true class (rows) and predicted class (columns); colour: share of the row. Classes that "
                "do not occur are left out.",
                title="Confusions of {{ first.model }}", each="model",
                rows=lambda record: [row for row in record.confusion if row.model in record.aliases[:_PICTURED]],
            ),),
        ),
        Section(
            "Is the confidence right?", lambda record: record.by_prediction if record.images >= FEWEST else (),
            opening=_leaning, about=("calibration",), order=lambda row: (row.p_holm, row.p),
            columns=("model", "class_name", "n", "confidence", "accuracy", "gap"),
            charts=(RELIABILITY,),
        ),
    ),
)  # fmt: skip
