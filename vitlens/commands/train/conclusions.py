"""Verdicts and findings of `vitlens train`, from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vitlens.commands.shared.pairs import PAIRS, PairRow
from vitlens.commands.shared.worst_class import worst_class
from vitlens.commands.train.gaps import gain, generalisation_gap, is_mixed, last_tenth
from vitlens.commands.train.record import (
    ACCURACY,
    CLASSES,
    DIFFERENCE,
    GAIN,
    GAP,
    HISTORY,
    IMAGES,
    RECIPE,
    STUDENT_AND_TEACHER,
    TEST_ACCURACIES,
    WAYS,
)
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import SMALLEST, finding
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import LEVEL, Estimate

RISING: Final = 1.0  # points in the last tenth of the epochs, from which on a training had not converged
_FEW: Final = 30  # images below which an accuracy beside another is not judged


def verdicts(record: Record) -> Iterator[Verdict]:
    """The accuracy of each trained model beside the best that was compared; without one it is not judged."""
    names = compared(record)
    if len(names) < 2:
        alias = record.aliases[0]
        because = "nothing to judge it by; --at-least accuracy=..., or vitlens evaluate with a second model"
        yield rules.not_tested(f"accuracy of {alias}", because, value=record.metric(ACCURACY(model=alias)))
        return
    best = max(names, key=lambda name: record.metric(ACCURACY(model=name)).value)
    for name in names:
        own, subject = record.metric(ACCURACY(model=name)), f"accuracy of {name}"
        gap = difference(record, name, best)
        if name == best:
            because = f"top-1 accuracy {in_words(own)}, the highest of those compared"
            yield Verdict(subject, "pass", None, rules.ACCURACY.words, because)
        elif gap is None:
            yield rules.not_tested(subject, f"the folder holds no paired difference from {best}", value=own)
        elif (own.n or 0) < _FEW:
            yield rules.inconclusive(subject, gap, rules.ACCURACY, f"fewer than {_FEW} images")
        else:
            yield rules.judged(subject, gap, rules.ACCURACY, f"difference from {best}")


def findings(record: Record) -> Iterator[Finding | None]:
    """Models that were compared, a training that had not converged, overfitting, the worst class."""
    for row in record.rows(PAIRS):
        yield _pair(record, row)
    if record.rows(TEST_ACCURACIES):
        return
    alias = record.aliases[0]
    yield _still_rising(record, alias)
    yield _overfitted(record, alias)
    classes = record.rows(CLASSES)
    yield worst_class(alias, classes, record.metric(ACCURACY(model=alias)))


def compared(record: Record) -> Sequence[str]:
    """The models whose accuracies are compared, the trained one first."""
    if record.rows(TEST_ACCURACIES):
        return tuple(WAYS)
    return tuple(row.model for row in record.rows(STUDENT_AND_TEACHER))


def difference(record: Record, first: str, second: str) -> Estimate | None:
    """The accuracy of the first minus that of the second, in points; None where it was not written."""
    known = record.metrics.get(DIFFERENCE(first=first, second=second))
    turned = record.metrics.get(DIFFERENCE(first=second, second=first))
    if known is not None or turned is None:
        return known
    low, high = (None if end is None else -end for end in (turned.high, turned.low))
    return replace(turned, value=-turned.value, low=low, high=high)


def gap_of(record: Record, alias: str) -> Estimate | None:
    """How much lower the accuracy is on test images than on training images; from the epochs in older folders."""
    known = record.metrics.get(GAP(model=alias))
    recipe = {row.setting: row.value for row in record.rows(RECIPE) if row.setting in ("mixup", "cutmix")}
    if known is not None or is_mixed(recipe):
        return known
    images = sum(row.training for row in record.rows(IMAGES))
    return generalisation_gap(record.rows(HISTORY), record.metric(ACCURACY(model=alias)), images=images)


def gain_of(record: Record, alias: str) -> Estimate | None:
    """How much test accuracy rose in the last tenth of the epochs; from the epochs in older folders."""
    known = record.metrics.get(GAIN(model=alias))
    tested = sum(row.test for row in record.rows(IMAGES))
    return gain(record.rows(HISTORY), tested=tested) if known is None and tested else known


def _pair(record: Record, row: PairRow) -> Finding | None:
    gap = difference(record, row.first, row.second)
    if gap is None or row.p_holm > LEVEL or abs(gap.value) < SMALLEST:
        return None
    better, worse = (row.first, row.second) if gap.value > 0 else (row.second, row.first)
    shown = gap if gap.value > 0 else difference(record, row.second, row.first)
    if shown is None:
        return None
    own = [record.metric(ACCURACY(model=name)) for name in (better, worse)]
    return finding(
        f"**{_words(better)}** reaches a higher accuracy than **{_words(worse)}**, {in_words(own[0], with_n=False)} "
        f"against {in_words(own[1], with_n=False)} (McNemar's exact test).",
        shown,
        kind="comparison",
        p=row.p_holm,
        figure="compared" if record.rows(TEST_ACCURACIES) else "beside",
        rows=(row, *own),
    )


def _words(name: str) -> str:
    """A way of training in words; the alias of a model as it is."""
    return {"frozen": "The head alone", "full": "training all weights"}.get(name, name)


def _still_rising(record: Record, alias: str) -> Finding | None:
    """That accuracy still rose when training ended."""
    rise, pair = gain_of(record, alias), last_tenth(record.rows(HISTORY))
    if rise is None or pair is None or rise.value < RISING:
        return None
    before, last = pair
    epochs = last.epoch - before.epoch
    span = "epoch" if epochs == 1 else f"{epochs} epochs"
    return finding(
        f"**{alias}** had not converged: in the last {span} of {len(record.rows(HISTORY))} its test accuracy rose from "
        f"{percent(before.test_accuracy or 0.0, 1)} to {percent(last.test_accuracy or 0.0, 1)}; more epochs may help.",
        rise,
        kind="hidden fault",
        figure="training",
        rows=(*pair, rise, epochs, len(record.rows(HISTORY))),
    )


def _overfitted(record: Record, alias: str) -> Finding | None:
    """That accuracy is lower on test images than on training images."""
    gap, own = gap_of(record, alias), record.metric(ACCURACY(model=alias))
    if gap is None or gap.low is None or gap.low < SMALLEST:
        return None
    last = record.rows(HISTORY)[-1]
    return finding(
        f"**{alias}** overfits: in the last epoch it classifies {percent(last.train_accuracy, 1)} of the training "
        f"images correctly, as they were augmented, and {in_words(own, with_n=False)} of the test images.",
        gap,
        kind="fact",
        figure="training",
        rows=(last, own, gap),
    )
