"""Verdicts and findings of `vitlens predict`, from its record: what is worth the first page of predictions."""

from collections import Counter
from collections.abc import Iterator

from vitlens.commands.predict.record import PREDICTIONS, PredictionRow
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate, wilson

_SHARE = 0.5  # of the images, above which one predicted class is a finding
_FEW = 10  # images below which it is none


def verdicts(record: Record) -> Iterator[Verdict]:
    """That accuracy is not judged here: with labels its estimate, without them the reason."""
    subject, rows = f"accuracy of {record.aliases[0]}", record.rows(PREDICTIONS)
    right = accuracy(rows)
    if right is None:
        yield rules.not_tested(subject, "the images have no labels; vitlens evaluate with labelled data judges it")
    else:
        yield rules.not_tested(subject, "vitlens evaluate judges it, with classes and calibration", value=right)


def findings(record: Record) -> Iterator[Finding | None]:
    """That one class is predicted for most images although they have several labels."""
    rows = record.rows(PREDICTIONS)
    labels = {row.label for row in rows}
    if len(rows) < _FEW or None in labels or len(labels) < 2:
        return
    (name, count), *_ = Counter(row.class_1 for row in rows).most_common(1)
    own = sum(row.label == name for row in rows)
    if count > max(own, _SHARE * len(rows)):
        yield finding(
            f"**{record.aliases[0]}** predicts class {name} for {count} of {len(rows)} images, of which {own} have "
            "that label.",
            wilson(count, len(rows)),
            kind="hidden fault",
            reference=max(_SHARE, own / len(rows)),
            figure="predictions",
            rows=(*rows, count, own),
        )


def accuracy(rows: tuple[PredictionRow, ...]) -> Estimate | None:
    """The share of images whose most probable class is the label; None where one has no label."""
    if not rows or any(row.label is None for row in rows):
        return None
    return wilson(sum(row.class_1 == row.label for row in rows), len(rows))


def opening(rows: tuple[PredictionRow, ...]) -> tuple[str, tuple[object, ...]]:
    """The first sentence of the report, and what backs it."""
    images = f"{len(rows):,} image{'' if len(rows) == 1 else 's'}"
    right = accuracy(rows)
    if right is None:
        return f"{images}; without labels, so whether the predictions are correct is not known.", (*rows, len(rows))
    return f"{images}: the most probable class is the label for {in_words(right)}.", (*rows, len(rows), right)
