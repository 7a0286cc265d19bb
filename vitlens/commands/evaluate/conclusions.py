"""Verdicts and findings of `vitlens evaluate`, from its record."""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Final

from vitlens.commands.evaluate.record import ACCURACY, CLASSES, CONFIDENCE_GAP, DIFFERENCE, ClassRow
from vitlens.commands.scaffold.calibration import calibration_verdict
from vitlens.commands.scaffold.pairs import PAIRS, PairRow
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate

_CLASS: Final = 10  # images of a class that is named


def verdicts(record: Record) -> Iterator[Verdict]:
    """Accuracy beside the best model that was compared, and calibration, of each model."""
    best = max(record.aliases, key=lambda alias: record.metric(ACCURACY(model=alias)).value)
    for alias in record.aliases:
        own = record.metric(ACCURACY(model=alias))
        if len(record.aliases) == 1:
            yield rules.not_tested(
                f"accuracy of {alias}", "no other model to judge it by; name a second, or --at-least", value=own
            )
        elif alias == best:
            because = f"top-1 accuracy {in_words(own)}, the highest of the models compared"
            yield Verdict(f"accuracy of {alias}", "pass", None, rules.ACCURACY.words, because)
        else:
            yield rules.judged(
                f"accuracy of {alias}", _difference(record, alias, best), rules.ACCURACY, f"difference from {best}"
            )
        yield calibration_verdict(record, alias)


def findings(record: Record) -> Iterator[Finding | None]:
    """Differences between models, confidence against accuracy, and the class with the lowest accuracy."""
    for row in record.rows(PAIRS):
        yield _pair(record, row)
    for alias in record.aliases:
        gap = record.metric(CONFIDENCE_GAP(model=alias))
        word, side = ("overconfident", "above") if gap.value > 0 else ("underconfident", "below")
        claim = f"**{alias}** is {word}: its mean confidence is {side} its accuracy."
        yield finding(claim, gap, kind="hidden fault", figure="calibration")
        yield _worst_class(record, alias)


def _difference(record: Record, alias: str, best: str) -> Estimate:
    """Accuracy of a model minus that of the best, in points."""
    for row in record.rows(PAIRS):
        gain = record.metric(DIFFERENCE(first=row.first, second=row.second))
        if (row.first, row.second) == (alias, best):
            return gain
        if (row.first, row.second) == (best, alias):
            return _negative(gain)
    raise KeyError(f"{alias} and {best}")


def _negative(gain: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (gain.high, gain.low))
    return Estimate(-gain.value, low, high, gain.n, gain.unit)


def _pair(record: Record, row: PairRow) -> Finding | None:
    if row.p_holm > LEVEL:
        return None
    gain = record.metric(DIFFERENCE(first=row.first, second=row.second))
    better, worse = (row.first, row.second) if gain.value > 0 else (row.second, row.first)
    gain = gain if gain.value > 0 else _negative(gain)
    return finding(
        f"**{better}** classifies more images correctly than **{worse}** (McNemar's exact test).",
        gain,
        kind="comparison",
        p=row.p_holm,
        rows=(row,),
    )


def _worst_class(record: Record, alias: str) -> Finding | None:
    """The class with the lowest accuracy, where it is below the others' also for as many comparisons as classes."""
    overall = record.metric(ACCURACY(model=alias))
    rows = [row for row in record.rows(CLASSES) if row.model == alias and row.n >= _CLASS and row.accuracy is not None]
    if len(rows) < 3:
        return None
    worst: ClassRow = min(rows, key=lambda row: row.accuracy or 0.0)
    accuracy = worst.estimate
    if accuracy is None or accuracy.low is None or accuracy.high is None:
        return None
    normal = NormalDist()
    wider = normal.inv_cdf(1 - LEVEL / 2 / len(rows)) / normal.inv_cdf(1 - LEVEL / 2)
    if overall.value - accuracy.value <= wider * (accuracy.high - accuracy.value):
        return None
    return finding(
        f"**{alias}** classifies images of class {worst.class_name} worst; over all classes its top-1 accuracy is "
        f"{in_words(overall, with_n=False)}.",
        Estimate(accuracy.value, accuracy.low, accuracy.high, worst.n),
        kind="fact",
        reference=overall.value,
        figure="per_class",
        rows=(worst,),
    )
