"""Verdicts and findings of `vitlens evaluate`, from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt

from vitlens.commands.evaluate.record import (
    ACCURACY,
    CLASSES,
    CONFIDENCE_GAP,
    DIFFERENCE,
    PREDICTED,
    PredictedClassRow,
)
from vitlens.commands.scaffold.calibration import ENOUGH, FEW, calibration_verdict
from vitlens.commands.scaffold.pairs import PAIRS, PairRow
from vitlens.commands.scaffold.worst_class import worst_class
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import FOUND, SMALLEST, clear, finding
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import LEVEL, Estimate


def verdicts(record: Record) -> Iterator[Verdict]:
    """Accuracy beside the best model that was compared, and calibration, of each model."""
    best = max(record.aliases, key=lambda alias: record.metric(ACCURACY(model=alias)).value)
    for alias in record.aliases:
        own, subject = record.metric(ACCURACY(model=alias)), f"accuracy of {alias}"
        if len(record.aliases) == 1:
            yield rules.not_tested(subject, "no other model to judge it by; name a second, or --at-least", value=own)
        elif (own.n or 0) < FEW:
            because = f"fewer than {FEW} images do not order models; raise --limit"
            yield rules.inconclusive(subject, own, rules.ACCURACY, because)
        elif alias == best:
            because = f"top-1 accuracy {in_words(own)}, the highest of the models compared"
            yield Verdict(subject, "pass", None, rules.ACCURACY.words, because)
        else:
            yield rules.judged(subject, _difference(record, alias, best), rules.ACCURACY, f"difference from {best}")
        yield calibration_verdict(record, alias)


def findings(record: Record) -> Iterator[Finding | None]:
    """Differences between models, confidence against accuracy, and the class with the lowest accuracy."""
    for row in record.rows(PAIRS):
        yield _pair(record, row)
    for alias in record.aliases:
        predicted = [row for row in record.rows(PREDICTED) if row.model == alias]
        leaning = misjudged(predicted)
        yield _class_confidence(alias, predicted, leaning)
        if not (leaning and _calibrated([row for row in predicted if row not in leaning])):
            yield _confidence(record, alias)
        own = [row for row in record.rows(CLASSES) if row.model == alias]
        yield worst_class(alias, own, record.metric(ACCURACY(model=alias)))


def misjudged(rows: Sequence[PredictedClassRow]) -> list[PredictedClassRow]:
    """The predicted classes whose confidence differs from their accuracy, also after the correction for their number,
    those with the most images too few or too many correct first."""
    found = [row for row in rows if row.p_holm <= FOUND and 100 * abs(row.gap) >= SMALLEST and clear(row.estimate, 0.0)]
    return sorted(found, key=lambda row: -abs(row.gap) * row.n)


def leans(gap: float) -> str:
    """The word for a confidence above or below the accuracy."""
    return "overconfident" if gap > 0 else "underconfident"


def negative(gain: Estimate) -> Estimate:
    """A difference the other way round."""
    low, high = (None if end is None else -end for end in (gain.high, gain.low))
    return replace(gain, value=-gain.value, low=low, high=high)


def _calibrated(rows: Sequence[PredictedClassRow]) -> bool:
    """Whether these predicted classes together show neither over- nor underconfidence."""
    count = sum(row.n for row in rows)
    if not count:
        return False
    mean = sum(row.n * row.gap for row in rows) / count
    halves = [row.n * (row.high - row.low) / 2 for row in rows if row.low is not None and row.high is not None]
    half = sqrt(sum(each**2 for each in halves)) / count
    return abs(mean) <= max(half, SMALLEST / 100)


def _difference(record: Record, alias: str, best: str) -> Estimate:
    """Accuracy of a model minus that of the best, in points."""
    for row in record.rows(PAIRS):
        gain = record.metric(DIFFERENCE(first=row.first, second=row.second))
        if (row.first, row.second) == (alias, best):
            return gain
        if (row.first, row.second) == (best, alias):
            return negative(gain)
    raise KeyError(f"{alias} and {best}")


def _pair(record: Record, row: PairRow) -> Finding | None:
    gain = record.metric(DIFFERENCE(first=row.first, second=row.second))
    if row.p_holm > LEVEL or abs(gain.value) < SMALLEST:
        return None
    better, worse = (row.first, row.second) if gain.value > 0 else (row.second, row.first)
    gain = gain if gain.value > 0 else negative(gain)
    return finding(
        f"**{better}** classifies more images correctly than **{worse}** (McNemar's exact test).",
        gain,
        kind="comparison",
        p=row.p_holm,
        rows=(row,),
    )


def _class_confidence(
    alias: str, rows: Sequence[PredictedClassRow], leaning: Sequence[PredictedClassRow]
) -> Finding | None:
    """The predicted class whose confidence misleads most."""
    if not leaning:
        return None
    row, others = leaning[0], [each for each in rows if each not in leaning]
    rest = f"; {len(leaning)} of {len(rows)} predicted classes differ like this" if len(leaning) > 1 else ""
    if _calibrated(others):
        rest += "; over its other predictions neither over- nor underconfidence is shown"
    return finding(
        f"**{alias}** is {leans(row.gap)} where it predicts class {row.class_name}: mean confidence "
        f"{percent(row.confidence, 1)}, accuracy {percent(row.accuracy, 1)} of {row.n:,} images{rest}.",
        row.estimate,
        kind="hidden fault",
        p=row.p_holm,
        figure="calibration",
        rows=(row, *rows),
    )


def _confidence(record: Record, alias: str) -> Finding | None:
    gap = record.metric(CONFIDENCE_GAP(model=alias))
    if (gap.n or 0) < ENOUGH or 100 * abs(gap.value) < SMALLEST:
        return None
    side = "above" if gap.value > 0 else "below"
    claim = f"**{alias}** is {leans(gap.value)}: its mean confidence is {side} its accuracy."
    return finding(claim, gap, kind="hidden fault", figure="calibration", rows=(gap,))
