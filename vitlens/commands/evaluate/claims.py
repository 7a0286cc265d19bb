"""What `vitlens evaluate` claims: accuracy, which model is better, confidence against accuracy, and the worst class."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from typing import Final

from vitlens.commands.evaluate.record import ClassRow, EvaluateRecord, PredictedClassRow, ScoreRow
from vitlens.commands.scaffold.calibration import DRAWN, ENOUGH, FEW
from vitlens.commands.scaffold.pairs import PairRow
from vitlens.commands.scaffold.worst_class import worst_of
from vitlens.report.claims import Claim, found, judge
from vitlens.report.findings import FOUND, SMALLEST, clear
from vitlens.report.prose import say
from vitlens.uncertainty import LEVEL, Estimate

FEWEST: Final = 20  # images, of a model or a class, below which nothing is claimed


def claims(record: EvaluateRecord) -> Iterator[Claim]:
    """Which model is better, what is judged of each, and where its confidence and its classes are worst."""
    if record.images >= FEW:
        yield from _which(record)
    for score in record.scores:
        yield from _accuracy(record, score)
        yield _calibration(score)
        yield from _confidence(record, score)
        yield from _worst(record, score)


def best_of(record: EvaluateRecord) -> str:
    """The model with the highest accuracy."""
    return max(record.scores, key=lambda row: row.accuracy.value).model


def gain(row: PairRow, of: str) -> Estimate:
    """The difference of accuracy of a pair as one of its models minus the other."""
    difference = row.difference or Estimate(0.0, unit="points")
    if row.first == of:
        return difference
    low, high = (None if end is None else -end for end in (difference.high, difference.low))
    return replace(difference, value=-difference.value, low=low, high=high)


def differs(row: PairRow) -> bool:
    """Whether the two models differ significantly, and by more than is too small to matter."""
    return row.p_holm <= LEVEL and abs(gain(row, row.first).value) >= SMALLEST


def _which(record: EvaluateRecord) -> Iterator[Claim]:
    """The answer: the accuracy of one model, or the best of several and which others it exceeds."""
    best = best_of(record)
    top = next(row for row in record.scores if row.model == best)
    own = [row for row in record.pairs if best in (row.first, row.second)]
    given = {"best": best, "top": top.accuracy, "n": record.images, "pairs": own}
    if not own:
        yield Claim(
            "top-1 accuracy", best, say("**{{ best }}** classifies {{ top }} of the images correctly.", **given),
            title=say("{{ best }} classifies {{ right }} of {{ n }} images correctly",
                      right=record.images - record.errors, **given),
            effect=top.accuracy, kind="answer",
        )  # fmt: skip
        return
    worse = [row for row in own if differs(row)]
    others = [row.second if row.first == best else row.first for row in own if not differs(row)]
    for row in worse:
        other = row.second if row.first == best else row.first
        size = gain(row, best)
        title = say(
            "{{ best }} classifies more images correctly than "
            "{% if several %}the {{ several }} other models{% else %}{{ other }}{% endif %}",
            other=other, several=len(own) if len(own) > 1 else 0, **given,
        )  # fmt: skip
        yield Claim(
            "which is better", f"{best} and {other}",
            say(
                "**{{ best }}** classifies more images correctly than **{{ other }}**: {{ top|value }}, {{ size }} "
                "more (McNemar's exact test, p = {{ row.p_holm|number }}).",
                size=size, other=other, row=row, **given,
            ),
            title="" if others else title, effect=size, p=row.p_holm, kind="answer",
        )  # fmt: skip
    if others:
        yield Claim(
            "no difference", best,
            say(
                "**{{ best }}** has the highest accuracy, {{ top|alone }}, but no significant lead over "
                "{{ others|names }}{% if size is not none %}: {{ size|alone }}, p = {{ row.p_holm|number }}{% endif "
                "%}.",
                others=others, row=own[0], size=gain(own[0], best) if len(own) == 1 else None, **given,
            ),
            title=say("{{ best }} has no significant lead over {{ others|join(' or ') }} in accuracy",
                      others=others[:2], **given),
            kind="answer",
        )  # fmt: skip


def _accuracy(record: EvaluateRecord, score: ScoreRow) -> Iterator[Claim]:
    """The judgement of a model beside the best that was compared; none for a single model."""
    if len(record.scores) < 2:
        return
    best = best_of(record)
    if record.images < FEW:
        because = say("fewer than {{ few }} images do not order models; raise --limit", few=FEW)
        yield Claim("accuracy", score.model, state="inconclusive", limit="accuracy", because=because)
    elif score.model == best:
        because = say("top-1 accuracy {{ own }}, the highest of the models compared", own=score.accuracy)
        yield Claim("accuracy", score.model, state="pass", limit="accuracy", because=because)
    else:
        row = next(row for row in record.pairs if {row.first, row.second} == {score.model, best})
        because = say("difference from {{ best }}", best=best)
        yield judge("accuracy", score.model, gain(row, score.model), "accuracy", because=because)


def _calibration(score: ScoreRow) -> Claim:
    if (score.calibration_error.n or 0) >= ENOUGH:
        because = "expected calibration error"
        return judge("calibration", score.model, score.calibration_error, "calibration", because=because)
    because = say("expected calibration error of fewer than {{ n }} images, which bins bias upwards", n=ENOUGH)
    return Claim("calibration", score.model, state="inconclusive", limit="calibration", because=because)


def misjudged(rows: Sequence[PredictedClassRow]) -> list[PredictedClassRow]:
    """The predicted classes, of enough images, whose confidence differs from their accuracy, also after the correction
    for their number, those with the most images too few or too many correct first."""
    known = [r for r in rows if r.n >= FEWEST and r.p_holm <= FOUND and 100 * abs(r.gap.value) >= SMALLEST]
    return sorted((row for row in known if clear(row.gap, 0.0)), key=lambda row: -abs(row.gap.value) * row.n)


def leans(gap: Estimate) -> str:
    """The word for a confidence above or below the accuracy."""
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
    others = [row for row in rows if row not in leaning]
    place = "calibration" if record.images >= DRAWN else ""
    if leaning:
        row = leaning[0]
        yield found(
            "confidence by class", score.model,
            "**{{ row.model }}** is {{ leans }} where it predicts class {{ row.class_name }}: mean confidence "
            "{{ row.confidence|percent(1) }}, accuracy {{ row.accuracy|percent(1) }} of {{ row.n }} images"
            "{% if several %}; {{ several }} of {{ rows|length }} predicted classes differ like this{% endif %}"
            "{% if calibrated %}; its other predictions together show none{% endif %}.",
            row.gap,
            given={"row": row, "leans": leans(row.gap), "rows": rows, "calibrated": _calibrated(others),
                   "several": len(leaning) if len(leaning) > 1 else 0},
            kind="hidden fault", p=row.p_holm, place=place,
        )  # fmt: skip
    gap = score.confidence_gap
    if not (leaning and _calibrated(others)) and (gap.n or 0) >= ENOUGH and 100 * abs(gap.value) >= SMALLEST:
        yield found(
            "confidence", score.model,
            "**{{ model }}** is {{ leans }}: mean confidence minus accuracy is {{ effect|points }}.",
            gap, given={"model": score.model, "leans": leans(gap)}, kind="hidden fault", place=place,
        )  # fmt: skip


def _worst(record: EvaluateRecord, score: ScoreRow) -> Iterator[Claim]:
    own: list[tuple[ClassRow, Estimate | None]] = [
        (row, row.accuracy) for row in record.per_class if row.model == score.model and row.n >= FEWEST
    ]
    worst = worst_of(own, score.accuracy)
    if worst is not None:
        row, accuracy = worst
        yield found(
            "worst class", score.model,
            "**{{ row.model }}** classifies images of class {{ row.class_name }} worst: {{ effect }}, beside "
            "{{ overall|value }} of all images.",
            replace(accuracy, n=row.n), given={"row": row, "overall": score.accuracy}, reference=score.accuracy.value,
            place="per_class",
        )  # fmt: skip
