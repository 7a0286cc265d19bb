"""Verdicts and findings of `vitlens features`, from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import (
    ACCURACY,
    DATA,
    DEPTH,
    HEAD_DIFFERENCES,
    PAIRS,
    PROBE_ACCURACY,
    RETRIEVAL,
    SIMILARITY,
    SPACE,
    TEMPLATES,
)
from vitlens.commands.features.record.rows import (
    PROBE,
    DepthRow,
    FeatureDataRow,
    FeaturePairRow,
    SimilarityRow,
    TemplateRow,
)
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Support, Verdict
from vitlens.report.findings import SMALLEST, finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, widened

GROUP: Final = 10  # images of a class from which on a map can show it as a group
SEARCHED: Final = 100  # images from which on the nearest of them says something
_FEW: Final = 30  # images below which an accuracy beside another is not judged


def verdicts(record: Record) -> Iterator[Verdict]:
    """Each model's own head beside a linear probe of its last layer; maps and retrieval that can show nothing."""
    (data,) = record.rows(DATA)
    for alias in record.aliases:
        yield _head(record, data, alias)
    largest, needed = largest_class(data), f"classes of at least {GROUP} images"
    if 0 < largest < GROUP and any(row.of == "images" for row in record.rows(SPACE)):
        images = "image" if largest == 1 else "images"
        because = f"the largest class has {largest} {images} of {data.test:,}: no group can be seen"
        yield Verdict("groups by class in the maps", "inconclusive", None, needed, because)
    few = [row for row in record.rows(RETRIEVAL) if row.images < SEARCHED]
    if few:
        because = f"the nearest of {few[0].images} images need not be near"
        yield Verdict("nearest images", "inconclusive", None, f"at least {SEARCHED} images", because)


def findings(record: Record) -> Iterator[Finding | None]:
    """Differences between models, features that hold more than the head reads, layers and wordings that differ."""
    for first, second in dict.fromkeys((row.first, row.second) for row in record.rows(PAIRS)):
        yield _pair([row for row in record.rows(PAIRS) if (row.first, row.second) == (first, second)], record)
    for row in record.rows(HEAD_DIFFERENCES):
        if row.classifier == PROBE:
            yield _more_than_head(row, record)
    for alias in record.aliases:
        rows = [row for row in record.rows(DEPTH) if (row.model, row.classifier) == (alias, PROBE)]
        yield _better_layer(rows)
        yield _wording([row for row in record.rows(TEMPLATES) if row.model == alias])
    for similarity in record.rows(SIMILARITY):
        yield _unlike(similarity)


def largest_class(data: FeatureDataRow) -> int:
    """How many test images the largest class has; 0 where there are no labels."""
    return round(data.chance * data.test)


def _head(record: Record, data: FeatureDataRow, alias: str) -> Verdict:
    subject, own = f"classifier of {alias}", record.metrics.get(ACCURACY(model=alias))
    rows = [row for row in record.rows(HEAD_DIFFERENCES) if (row.first, row.classifier) == (alias, PROBE)]
    if own is None or data.bank is None:
        because = data.no_bank or "its classes are not those of the data"
        return rules.not_tested(subject, f"no linear probe to judge it by: {because}", value=own)
    if not rows:
        probed = PROBE_ACCURACY(model=alias) in record.metrics
        because = "the folder holds no paired test of classifier and probe" if probed else "--no-probe"
        return rules.not_tested(subject, f"{because}; run the command again", value=own)
    gap = rows[0].estimate
    low, high = (None if end is None else -end for end in (gap.high, gap.low))
    gain = replace(gap, value=-gap.value, low=low, high=high)
    if rows[0].n < _FEW:
        return rules.inconclusive(subject, gain, rules.ACCURACY, f"fewer than {_FEW} images")
    return rules.judged(subject, gain, rules.ACCURACY, "its accuracy minus that of a linear probe of its last layer")


def _pair(rows: Sequence[FeaturePairRow], record: Record) -> Finding | None:
    """Which of two models has the features that are classified better, by the probe (else by the most neighbours)."""
    most = f"knn-{max(record.options(FeaturesOptions).ks)}"
    by = {row.classifier: row for row in rows if row.classifier in (PROBE, most)}
    shown = [row for row in by.values() if row.p_holm <= LEVEL and abs(row.difference) >= SMALLEST]
    if not shown:
        return None
    row = by[PROBE] if by.get(PROBE) in shown else shown[0]
    better, worse = (row.first, row.second) if row.difference > 0 else (row.second, row.first)
    sign = 1.0 if row.difference > 0 else -1.0
    gap = replace(row.estimate, value=abs(row.difference))
    if row.low is not None and row.high is not None:
        low, high = sorted((sign * row.low, sign * row.high))
        gap = replace(gap, low=low, high=high)
    how = {PROBE: "a linear probe"}.get(row.classifier, "nearest neighbours")
    return finding(
        f"The last layer of **{better}** is classified better than that of **{worse}** by {how} (McNemar's exact "
        "test).",
        gap,
        kind="comparison",
        p=row.p_holm,
        figure="depth",
        support=_support(list(by.values())),
        rows=tuple(by.values()),
    )


def _support(rows: Sequence[FeaturePairRow]) -> Support:
    """Whether probe and neighbours say the same."""
    significant = {row.difference > 0 for row in rows if row.p_holm <= LEVEL}
    if len(rows) < 2:
        return "one method"
    if len(significant) == 2:
        return "methods disagree"
    return "two methods agree" if all(row.p_holm <= LEVEL for row in rows) else "one method"


def _more_than_head(row: FeaturePairRow, record: Record) -> Finding | None:
    if row.p_holm > LEVEL or row.difference < SMALLEST:
        return None
    own, probe = (record.metric(metric(model=row.first)) for metric in (ACCURACY, PROBE_ACCURACY))
    return finding(
        f"The features of **{row.first}** hold more than its classifier reads: a linear probe of its last layer "
        f"reaches {in_words(probe, with_n=False)}, its own classifier {in_words(own, with_n=False)} "
        "(McNemar's exact test).",
        row.estimate,
        kind="hidden fault",
        p=row.p_holm,
        figure="depth",
        rows=(row, own, probe),
    )


def _better_layer(rows: Sequence[DepthRow]) -> Finding | None:
    """A layer whose probe is better than that of the last, also for as many looks as layers."""
    if len(rows) < 2:
        return None
    last, best = rows[-1], max(rows, key=lambda row: row.accuracy)
    looks = len(rows) - 1
    if apart(widened(best.estimate, looks), widened(last.estimate, looks)) is not Side.ABOVE:
        return None
    return finding(
        f"A linear probe reads the class better from {best.place} of **{best.model}** than from {last.place}, its last "
        f"({in_words(last.estimate)}).",
        best.estimate,
        kind="fact",
        reference=last.accuracy,
        figure="depth",
        rows=(best, last),
    )


def _wording(rows: Sequence[TemplateRow]) -> Finding | None:
    """The template whose zero-shot accuracy differs most from the ensemble's."""
    differing = [row for row in rows[1:] if row.p_holm is not None and row.p_holm <= LEVEL and row.gain_estimate]
    if not differing:
        return None
    row = max(differing, key=lambda row: abs(row.gain or 0.0))
    gain = row.gain_estimate
    if gain is None or abs(gain.value) < SMALLEST:
        return None
    word = "raises" if gain.value > 0 else "lowers"
    return finding(
        f"The wording “{row.template}” alone {word} the zero-shot accuracy of **{row.model}** beside the ensemble of "
        "all templates.",
        gain,
        kind="fact",
        p=row.p_holm,
        figure=f"templates_{row.model}",
        rows=(row,),
    )


def _unlike(row: SimilarityRow) -> Finding | None:
    """That the last layers of two models are less alike than the first of one and the last of the other."""
    if row.first == row.second or row.last_last is None or row.first_last is None:
        return None
    last = Estimate(row.last_last, row.last_last_low, row.last_last_high, row.images, "")
    first = Estimate(row.first_last, row.first_last_low, row.first_last_high, row.images, "")
    if apart(last, first) is not Side.BELOW:
        return None
    return finding(
        f"The last layers of **{row.first}** and **{row.second}** are less alike (linear CKA) than the first layer of "
        f"{row.first} and the last of {row.second} ({in_words(first, with_n=False)}).",
        last,
        kind="fact",
        reference=first.value,
        figure="cka",
        rows=(row, last, first),
    )
