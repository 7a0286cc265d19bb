"""The answers that the sections of an audit open with, each from the rows of one chapter."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.record import AttackCurveRow
from vitlens.commands.audit.conclusions import consistency
from vitlens.commands.audit.parts import AuditPart
from vitlens.commands.audit.record import BUDGET, CANDIDATES, CandidateRow
from vitlens.commands.explain.record import CHECKS, LEAGUE
from vitlens.commands.shared.maps.judged import in_three_decimals
from vitlens.commands.shared.maps.rows import INSERTION, ROAD
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words, number
from vitlens.report.prose import say
from vitlens.uncertainty import Side, beyond

_NAMED: Final = 3  # classes, confusions or labels
_FAULTY: Final = ("dead", "uniform")


def accurate(part: AuditPart, _record: Record) -> Iterator[Sentence]:
    """Top-1 accuracy, and the classes with the lowest."""
    accuracy = part.record.scores[0].accuracy
    yield Sentence(f"Top-1 accuracy is {in_words(accuracy)}.", (accuracy,))
    rows = [row for row in part.record.per_class if row.accuracy is not None and row.accuracy.value < 1]
    lowest = sorted(rows, key=lambda row: row.accuracy.value)[:_NAMED]
    if len(rows) > 1:
        listed = "; ".join(
            say("{{ row.class_name }} {{ row.accuracy|alone }}, n = {{ row.n }}", row=row) for row in lowest
        )
        yield Sentence(f"The classes with the lowest accuracy: {listed}.", tuple(lowest))


def calibrated(part: AuditPart, _record: Record) -> Iterator[Sentence]:
    """The calibration error, and whether confidence is above or below accuracy."""
    (score,) = part.record.scores
    error, gap = score.calibration_error, score.confidence_gap
    words = {
        Side.ABOVE: f"it is overconfident: its mean confidence minus its accuracy is {in_words(gap)}",
        Side.BELOW: f"it is underconfident: its mean confidence minus its accuracy is {in_words(gap)}",
        Side.UNDECIDED: f"its mean confidence is not shown to differ from its accuracy: {in_words(gap)}",
    }
    yield Sentence(f"The expected calibration error is {in_words(error)}; {words[beyond(gap, 0.0)]}.", (error, gap))


def trusted(part: AuditPart, _record: Record) -> Iterator[Sentence]:
    """The best map and its verdict."""
    verdict = part.verdict("explanation")
    if verdict is not None:
        yield Sentence(f"The verdict is {verdict.state}: {verdict.because}.", (verdict,))
    rows = [row for row in part.record.rows(LEAGUE) if not row.baseline]
    if rows:
        known = [row for row in rows if row.road is not None]
        best = max(known or rows, key=lambda row: row.gap if row.road is None else row.road)
        gap = part.record.metric(CHECKS["road" if known else "gap"](model=best.model, method=best.method))
        yield Sentence(
            f"Of {len(rows)} methods, {best.method} has the greatest {ROAD if known else INSERTION}, "
            f"{in_three_decimals(gap)}: {best.verdict}.",
            (gap, *rows),
        )


def attacked(part: AuditPart, record: Record) -> Iterator[Sentence]:
    """The accuracy under the strongest attack at each epsilon, and how it was chosen."""
    rows = part.record.curves
    clean = next(row for row in rows if row.epsilon == 0)
    lowest = {row.epsilon: row for row in sorted(rows, key=lambda row: -row.accuracy.value) if row.epsilon > 0}
    listed = ", ".join(_at(lowest[epsilon]) for epsilon in sorted(lowest))
    start = in_words(clean.accuracy)
    if any(row.accuracy.value < clean.accuracy.value for row in lowest.values()):
        text = f"Accuracy is {start} on the clean images; under attack {listed}."
    else:
        text = (
            f"No attack lowers the accuracy on the clean images, {start}, which says more about these attacks than "
            "about the model."
        )
    yield Sentence(text, (clean, *lowest.values()))
    yield from choice(record)


def choice(record: Record) -> Iterator[Sentence]:
    """Which attack fits the budget, and which do not."""
    candidates, budgets = record.rows(CANDIDATES), record.rows(BUDGET)
    taken = next((row for row in candidates if row.state == "chosen"), None)
    if taken is None or not budgets:
        return
    budget = budgets[0]
    left = (
        f"The other chapters take {number(budget.others, 1)} min of `--budget {number(budget.minutes)}`, and an attack "
        f"may take {number(budget.left, 1)} min"
    )
    if taken is candidates[-1]:
        text = f"{left}: **no attack of several steps fits**, so FGSM, a single step, is all that was run."
    else:
        text = f"{left}: the strongest that fits is {attack_words(taken)}, at most {number(taken.minutes or 0, 1)} min."
    stronger = [row for row in candidates[: candidates.index(taken)] if row.minutes is not None]
    if stronger:
        ends = dict.fromkeys((stronger[-1], stronger[0]))
        listed = "; ".join(f"{attack_words(row)} may take {number(row.minutes or 0, 1)} min here" for row in ends)
        text += f" It is not the strongest that exists: {listed}. A larger `--budget` allows them."
    yield Sentence(text, (budget, *candidates))


def attack_words(row: CandidateRow) -> str:
    """An attack that was considered, in words."""
    names = " and ".join(ATTACKS[name].title for name in row.attacks)
    restarts = f" with {row.restarts} restarts" if row.restarts > 1 else ""
    return f"{names}{restarts} on {row.images:,} image{'s' if row.images != 1 else ''}"


def corrupted(part: AuditPart, _record: Record) -> Iterator[Sentence]:
    """Errors under corruptions beside those on clean images; without labels, the predictions that change."""
    (alias,) = part.record.aliases
    rows = part.record.corruptions
    error = part.record.metrics.get(f"mean_error_on_corruptions/{alias}")
    if error is None or not rows:
        return
    hardest = min(rows, key=lambda row: row.accuracy.value)
    where = f"under {hardest.kind} of severity {hardest.severity}, {in_words(hardest.accuracy)}"
    clean = part.record.metric(f"accuracy/{alias}")
    stay = consistency(part) if part.record.options["predicted"] else None
    if stay is not None:
        text = f"{in_words(stay)} of the predictions stay the same, mean over all kinds and severities; fewest {where}."
    else:
        text = (
            f"The mean error over all kinds and severities is {in_words(error)}, beside an accuracy of "
            f"{in_words(clean)} on the clean images; accuracy is lowest {where}."
        )
    yield Sentence(text, (error, stay, clean, hardest))


def failing(part: AuditPart, _record: Record) -> Iterator[Sentence]:
    """The most frequent confusions."""
    accuracy = part.record.scores[0].accuracy
    off_diagonal = (row for row in part.record.confusion if row.truth != row.prediction)
    rows = sorted(off_diagonal, key=lambda row: -row.count)
    if not rows:
        yield Sentence(f"No image is misclassified: top-1 accuracy {in_words(accuracy)}.", (accuracy,))
        return
    shown = rows[:_NAMED]
    listed = "; ".join(
        say("{{ row.truth }} taken for {{ row.prediction }}, {{ row.count }} image{{ row.count|s }}", row=row)
        for row in shown
    )
    of = f"Of {len(rows)} different confusions the most frequent are" if len(rows) > 1 else "The only confusion is"
    yield Sentence(f"{of}: {listed}.", tuple(rows))


def healthy(part: AuditPart, _record: Record) -> Iterator[Sentence]:
    """How many heads are dead or uniform, and what the others do."""
    heads = part.record.heads
    labels = Counter(row.label for row in heads if row.label is not None)
    if not labels:
        yield Sentence("No head has a label, as no layer's tokens can be placed in the image.", heads)
        return
    faulty = sum(labels[name] for name in _FAULTY)
    listed = ", ".join(f"{count} {label}" for label, count in labels.most_common() if label not in _FAULTY)
    text = f"{faulty} of {sum(labels.values())} heads {'is' if faulty == 1 else 'are'} dead or uniform"
    yield Sentence(f"{text}; the others are labelled {listed}." if listed else f"{text}.", heads)


def _at(row: AttackCurveRow) -> str:
    return f"{in_words(row.accuracy, with_n=False)} at {row.at} ({row.title})"
