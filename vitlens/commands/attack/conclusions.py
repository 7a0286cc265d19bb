"""Verdicts and findings of `vitlens attack`, from its record."""

from collections.abc import Iterator, Sequence

from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import CURVES, ROBUST_PAIRS
from vitlens.commands.attack.record.rows import AttackCurveRow, RobustPairRow
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate

_JUDGED = 1.0  # 255ths, L∞


def verdicts(record: Record) -> Iterator[Verdict]:
    """Robust accuracy at 1/255 under the strongest attack that was run, of each model."""
    rows = record.rows(CURVES)
    for alias in record.aliases:
        yield _robustness(alias, [row for row in rows if row.model == alias])


def findings(record: Record) -> Iterator[Finding | None]:
    """The largest difference of two models on clean images and under attack, and where a model's accuracy is lost."""
    for first, second in dict.fromkeys((row.first, row.second) for row in record.rows(ROBUST_PAIRS)):
        rows = [row for row in record.rows(ROBUST_PAIRS) if (row.first, row.second) == (first, second)]
        yield _difference([row for row in rows if row.attack == "clean"], record)
        yield _difference([row for row in rows if row.attack != "clean"], record)
    for alias in record.aliases:
        yield _loss(alias, [row for row in record.rows(CURVES) if row.model == alias])


def _robustness(alias: str, rows: Sequence[AttackCurveRow]) -> Verdict:
    subject = f"robustness of {alias}"
    clean = max((row.accuracy for row in rows if row.epsilon == 0), default=0.0)
    if clean == 0:
        return rules.inconclusive(subject, None, rules.ROBUSTNESS, "it classifies no clean image correctly")
    attacked = [row for row in rows if row.epsilon > 0]
    if attacked and min(row.accuracy for row in attacked) >= clean:
        because = "no attack fooled it at any epsilon, which says more about these attacks than about the model"
        return rules.inconclusive(subject, None, rules.ROBUSTNESS, because)
    tried = [row for row in attacked if row.norm == "linf" and row.epsilon == _JUDGED]
    if not tried:
        return rules.not_tested(subject, "no L∞ attack was run at 1/255; add --epsilon 0,1,2,4,8")
    weakest = min(tried, key=lambda row: row.accuracy)
    because = f"accuracy under {weakest.title} at 1/255, the strongest of {len(tried)} attacks that were run"
    return rules.judged(subject, weakest.estimate, rules.ROBUSTNESS, because)


def _difference(rows: Sequence[RobustPairRow], record: Record) -> Finding | None:
    """The largest significant difference of two models among these tests."""
    significant = [row for row in rows if row.p_holm <= LEVEL and row.low is not None and row.high is not None]
    if not significant:
        return None
    row = max(significant, key=lambda row: abs(row.difference))
    sign = 1.0 if row.difference > 0 else -1.0
    better, worse = (row.first, row.second) if sign > 0 else (row.second, row.first)
    ends = sorted(sign * end for end in (row.low, row.high) if end is not None)
    where = (
        "on clean images" if row.attack == "clean" else f"under {row.title} at {epsilon_words(row.epsilon, row.norm)}"
    )
    reached = " and ".join(f"{alias} {value}" for alias, value in _accuracies(row, record))
    return finding(
        f"**{better}** has a higher accuracy than **{worse}** {where} ({reached}; McNemar's exact test, corrected by "
        "Holm's method).",
        Estimate(sign * row.difference, ends[0], ends[1], unit="points"),
        kind="comparison",
        p=row.p_holm,
        figure="curves",
        rows=(row,),
    )


def _accuracies(row: RobustPairRow, record: Record) -> Iterator[tuple[str, str]]:
    for alias in (row.first, row.second):
        for curve in record.rows(CURVES):
            if curve.model == alias and (curve.epsilon, row.attack) in ((row.epsilon, curve.attack), (0.0, "clean")):
                yield alias, in_words(Estimate(curve.accuracy))
                break


def _loss(alias: str, rows: Sequence[AttackCurveRow]) -> Finding | None:
    """The accuracy under the strongest attack at the smallest epsilon at which most of the clean accuracy is lost."""
    clean = next((row for row in rows if row.epsilon == 0), None)
    if clean is None:
        return None
    lost = [row for row in rows if row.norm == "linf" and row.epsilon > 0 and row.accuracy < clean.accuracy / 2]
    if not lost:
        return None
    row = min(lost, key=lambda row: (row.epsilon, row.accuracy))
    return finding(
        f"**{alias}** loses more than half of its clean accuracy ({in_words(clean.estimate, with_n=False)}) under "
        f"{row.title} at {epsilon_words(row.epsilon, row.norm)}.",
        row.estimate,
        kind="expected fact",
        reference=clean.accuracy,
        figure="curves",
        rows=(row, clean),
    )
