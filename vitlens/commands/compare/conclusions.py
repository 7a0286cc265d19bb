"""Verdicts and findings of `vitlens compare`, from its record."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vitlens.commands.compare.fair import checks_of, map_comparison
from vitlens.commands.compare.levels import level_words
from vitlens.commands.compare.record import (
    ACCURACY,
    BY_CLASS,
    DIFFERENCE,
    DISTURBED_PAIRS,
    HALF_DIFFERENCE,
    HARDER,
    MCNEMAR_P,
    DisturbedPairRow,
    HarderRow,
)
from vitlens.commands.shared.calibration import calibration_verdict
from vitlens.commands.shared.maps.findings import map_findings, uniform_finding
from vitlens.commands.shared.maps.judged import explanation_verdict
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import SMALLEST, finding, ranked
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

_UNTESTED = "its maps were not checked; run the command again"


def verdicts(record: Record) -> Iterator[Verdict]:
    """Accuracy beside the better model, calibration, and explanation of both models."""
    for alias in record.aliases:
        yield _accuracy(record, alias)
        yield calibration_verdict(record, alias)
        yield explanation_verdict(alias, checks_of(record, alias), untested=_UNTESTED)


def findings(record: Record, more: Iterable[Finding | None] = ()) -> tuple[Finding, ...]:
    """The difference in accuracy first, as it is what the command was asked for; then the others by rank.

    more: those of other sections of the report.
    """
    return ranked([_difference(record), *_disturbed(record), *_maps(record), *more])


def _pair(record: Record) -> dict[str, str]:
    first, second = record.aliases
    return {"first": first, "second": second}


def _gain(record: Record, alias: str) -> Estimate:
    """Accuracy of a model minus that of the other, in points."""
    gain = record.metric(DIFFERENCE(**_pair(record)))
    return gain if alias == record.aliases[0] else _negative(gain)


def _negative(gain: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (gain.high, gain.low))
    return replace(gain, value=-gain.value, low=low, high=high)


def _accuracy(record: Record, alias: str) -> Verdict:
    subject, gain = f"accuracy of {alias}", _gain(record, alias)
    (other,) = (each for each in record.aliases if each != alias)
    if gain.value >= 0:
        because = f"top-1 accuracy {in_words(record.metric(ACCURACY(model=alias)))}, no lower than that of {other}"
        return Verdict(subject, "pass", None, rules.ACCURACY.words, because)
    if gain.low is None:
        return rules.inconclusive(subject, gain, rules.ACCURACY, "too few images for an interval")
    return rules.judged(subject, gain, rules.ACCURACY, f"difference from {other}")


def _difference(record: Record) -> Finding | None:
    """The paired difference of the two models, where McNemar's test shows one."""
    p, gain = record.metric(MCNEMAR_P(**_pair(record))), record.metric(DIFFERENCE(**_pair(record)))
    if p.value > LEVEL or abs(gain.value) < SMALLEST:
        return None
    better, worse = record.aliases if gain.value > 0 else record.aliases[::-1]
    accuracies = {alias: record.metric(ACCURACY(model=alias)) for alias in (better, worse)}
    reached = " and ".join(in_words(estimate, with_n=False) for estimate in accuracies.values())
    return finding(
        f"**{better}** classifies more images correctly than **{worse}**: {reached} (McNemar's exact test).",
        _gain(record, better),
        kind="answer",
        p=p.value,
        figure="errors",
        rows=(*record.rows(BY_CLASS), p, *accuracies.values()),
    )


def _disturbed(record: Record) -> Iterator[Finding | None]:
    """The largest difference on disturbed images in favour of each model, where that model is above chance there."""
    data = record.config.data
    chance = 1 / data.classes if data and data.classes else 0.0
    for alias, sign in zip(record.aliases, (1.0, -1.0)):
        rows = [row for row in record.rows(DISTURBED_PAIRS) if row.p_holm <= LEVEL and sign * row.difference > 0]
        able = [row for row in rows if beyond(_at(record, alias, row).estimate, chance) is Side.ABOVE]
        if able:
            yield _disturbed_finding(record, alias, max(able, key=lambda row: abs(row.difference)))


def _disturbed_finding(record: Record, alias: str, row: DisturbedPairRow) -> Finding | None:
    (other,) = (each for each in record.aliases if each != alias)
    own, others = _at(record, alias, row), _at(record, other, row)
    reached = f"{in_words(Estimate(own.accuracy))} and {in_words(Estimate(others.accuracy))}"
    gain = row.estimate if alias == record.aliases[0] else _negative(row.estimate)
    return finding(
        f"On disturbed images, **{alias}** is furthest ahead of **{other}** under {row.kind} at level "
        f"{level_words(row.kind, row.level)}: {reached} (McNemar's exact test, corrected by Holm's method).",
        gain,
        kind="comparison",
        p=row.p_holm,
        figure="robustness",
        rows=(row, own, others),
    )


def _at(record: Record, alias: str, row: DisturbedPairRow) -> HarderRow:
    """The accuracy of a model under the disturbance of a row."""
    wanted = (alias, row.kind, row.level)
    return next(each for each in record.rows(HARDER) if (each.model, each.kind, each.level) == wanted)


def _maps(record: Record) -> Iterator[Finding | None]:
    """Faults of the maps that are shown, and a difference between them where they are by one method: between two, even
    verified ones, it may be one of the methods, which is no matter for a first page."""
    comparison, gap = map_comparison(record), record.metrics.get(HALF_DIFFERENCE(**_pair(record)))
    for row, judged in zip(comparison.methods, comparison.judged):
        if judged is not None:
            check = judged.check
            yield from map_findings(row.model, [check], figure="panels_1")
            yield uniform_finding(row.model, {check.method: check.unusable}, check.images, [check])
    if comparison.same and gap is not None:
        first, second = record.aliases
        wider, narrower = (first, second) if gap.value > 0 else (second, first)
        yield finding(
            f"The maps of **{narrower}** are more concentrated than those of **{wider}** ({comparison.words}): the "
            "area that holds half of a map differs by this share of the image.",
            gap if gap.value > 0 else _negative(gap),
            kind="fact",
            figure="mean_maps",
            rows=comparison.rows,
        )
