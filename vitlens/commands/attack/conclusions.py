"""Verdicts and findings of `vitlens attack`, from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vitlens.analysis.robustness.verdict import CheckState
from vitlens.commands.attack.comparable import informative, strongest
from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.masking import fault_of, masked
from vitlens.commands.attack.record import (
    ACCURACY,
    CHECKS,
    CURVES,
    MEAN_CORRUPTION_ERROR,
    MEAN_ERROR,
    RELATIVE_ERROR,
    ROBUST_PAIRS,
)
from vitlens.commands.attack.record.rows import AttackCheckRow, AttackCurveRow, RobustPairRow
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import SMALLEST, finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate

_JUDGED: Final = 1.0  # 255ths, L∞
_FAR, _KEPT = 8.0, 0.8  # 255ths, and the share of the clean accuracy that no undefended model keeps there
_FEW: Final = 30  # images below which an error beside another is not judged
_EXPECTED: Final = "every self-check of every attack as expected"


def verdicts(record: Record) -> Iterator[Verdict]:
    """Robust accuracy at 1/255 under the strongest attack, the attacks' self-checks, and common corruptions."""
    for alias in record.aliases:
        rows = [row for row in record.rows(CURVES) if row.model == alias]
        checks = [row for row in record.rows(CHECKS) if row.model == alias]
        yield _doubted(_robustness(alias, rows), rows, checks)
        yield _checked(alias, checks)
        yield _corruptions(record, alias)


def findings(record: Record) -> Iterator[Finding | None]:
    """Masked gradients, the largest differences of two models, and where a model's accuracy is lost."""
    for alias in record.aliases:
        yield from masked(record, alias)
    for first, second in dict.fromkeys((row.first, row.second) for row in record.rows(ROBUST_PAIRS)):
        rows = [row for row in record.rows(ROBUST_PAIRS) if (row.first, row.second) == (first, second)]
        yield _difference([row for row in rows if row.attack == "clean"], record)
        yield _difference(informative(rows, record.rows(CURVES)), record)
    for parts, ratio in record.all(MEAN_CORRUPTION_ERROR):
        yield _relative(parts["model"], parts["baseline"], ratio)
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
    weakest = min(reversed(tried), key=lambda row: row.accuracy)  # of equals the last, as FGSM is named first
    because = f"accuracy under {weakest.title} at 1/255, the strongest of {len(tried)} attacks that were run"
    return rules.judged(subject, weakest.estimate, rules.ROBUSTNESS, because)


def _doubted(verdict: Verdict, rows: Sequence[AttackCurveRow], checks: Sequence[AttackCheckRow]) -> Verdict:
    """The verdict on a model's robustness, where faulty or weak attacks leave it no praise."""
    failed = [row for row in checks if row.check.state is CheckState.FAILED]
    if failed and verdict.state in ("pass", "warn"):
        because = (
            f"{verdict.because}, but {len(failed)} of {len(checks)} self-checks failed ({fault_of(failed[0], rows)}): "
            "the accuracy is too high by an unknown amount"
        )
        return replace(verdict, state="inconclusive", because=because)
    far = strongest([row for row in rows if row.norm == "linf" and row.epsilon >= _FAR])
    clean = max((row.accuracy for row in rows if row.epsilon == 0), default=0.0)
    if verdict.state == "pass" and far is not None and far.accuracy >= _KEPT * clean:
        because = (
            f"{verdict.because}; but at {epsilon_words(far.epsilon, far.norm)} it still has "
            f"{in_words(far.estimate, with_n=False)}, which no undefended model keeps: unless it was trained against "
            "attacks, these are too weak"
        )
        return replace(verdict, state="warn", because=because)
    return verdict


def _checked(alias: str, rows: Sequence[AttackCheckRow]) -> Verdict:
    """The self-checks of the attacks on one model: those that could not have failed are not passed."""
    subject = f"attacks on {alias}"
    states = [row.check.state for row in rows]
    failed, open_ = states.count(CheckState.FAILED), states.count(CheckState.INCONCLUSIVE)
    if not rows:
        because = "no image was classified correctly, so there was nothing to check the attacks on"
        return Verdict(subject, "inconclusive", None, _EXPECTED, because)
    if failed:
        because = f"{failed} of {len(rows)} self-checks failed: robust accuracies are too high"
        return Verdict(subject, "fail", None, _EXPECTED, because)
    if open_:
        because = f"{open_} of {len(rows)} self-checks could not have failed, as nothing was fooled in them"
        return Verdict(subject, "inconclusive", None, _EXPECTED, because)
    return Verdict(subject, "pass", None, _EXPECTED, f"{len(rows)} self-checks, each on images that were fooled")


def _corruptions(record: Record, alias: str) -> Verdict:
    subject, threshold = f"common corruptions of {alias}", rules.CORRUPTIONS
    if MEAN_ERROR(model=alias) not in record.metrics:
        return rules.not_tested(subject, "not run (--no-corruptions, or images without labels)")
    error, clean = record.metric(MEAN_ERROR(model=alias)), record.metric(ACCURACY(model=alias))
    ratio = over_clean(record, alias)
    if ratio is None:
        because = "it makes no error on the clean images, so there is nothing to divide by"
        return rules.inconclusive(subject, error, threshold, because)
    because = f"mean error {in_words(error, with_n=False)} over all kinds and severities, relative to the clean error"
    classes = record.config.data.classes if record.config.data else 0
    if clean.low is None or clean.low <= 1 / max(classes, 1):
        return rules.inconclusive(subject, ratio, threshold, "its clean accuracy is not above chance: nothing to lose")
    if (clean.n or 0) < _FEW:
        return rules.inconclusive(subject, ratio, threshold, f"{because}, of fewer than {_FEW} images")
    return rules.judged(subject, ratio, threshold, because)


def over_clean(record: Record, alias: str) -> Estimate | None:
    """The mean error on corruptions divided by the clean error; None where there is no clean error.

    In folders of earlier versions, which hold no such metric, the interval is the widest that those of the two errors
    allow.
    """
    known = record.metrics.get(RELATIVE_ERROR(model=alias))
    error, clean = record.metrics.get(MEAN_ERROR(model=alias)), record.metric(ACCURACY(model=alias))
    if known is not None or error is None or clean.value == 1:
        return known
    ratio = error.value / (1 - clean.value)
    if error.low is None or error.high is None or clean.low is None or clean.high is None or clean.high == 1:
        return Estimate(ratio, n=error.n, unit="")
    return Estimate(ratio, error.low / (1 - clean.low), error.high / (1 - clean.high), error.n, "")


def _relative(alias: str, baseline: str, ratio: Estimate) -> Finding | None:
    """One model's errors under corruptions in those of another."""
    if alias == baseline:
        return None
    word = "fewer" if ratio.value < 1 else "more"
    return finding(
        f"Under common corruptions **{alias}** makes {word} errors than **{baseline}**, as a share of its errors under "
        "the same corruption.",
        ratio,
        kind="comparison",
        reference=1.0,
        figure="corruptions",
        rows=(ratio,),
    )


def _difference(rows: Sequence[RobustPairRow], record: Record) -> Finding | None:
    """The largest significant difference of two models among these tests."""
    significant = [
        row
        for row in rows
        if row.p_holm <= LEVEL and abs(row.difference) >= SMALLEST and row.low is not None and row.high is not None
    ]
    if not significant:
        return None
    row = max(significant, key=lambda row: abs(row.difference))
    sign = 1.0 if row.difference > 0 else -1.0
    better, worse = (row.first, row.second) if sign > 0 else (row.second, row.first)
    ends = sorted(sign * end for end in (row.low, row.high) if end is not None)
    where = (
        "on clean images" if row.attack == "clean" else f"under {row.title} at {epsilon_words(row.epsilon, row.norm)}"
    )
    curves = list(_curves_of(row, record))
    reached = " and ".join(f"{curve.model} {in_words(Estimate(curve.accuracy))}" for curve in curves)
    return finding(
        f"**{better}** has a higher accuracy than **{worse}** {where} ({reached}; McNemar's exact test, corrected by "
        "Holm's method).",
        Estimate(sign * row.difference, ends[0], ends[1], unit="points"),
        kind="comparison",
        p=row.p_holm,
        figure="curves",
        rows=(row, *curves),
    )


def _curves_of(row: RobustPairRow, record: Record) -> Iterator[AttackCurveRow]:
    """The accuracies of both models at which a test was made."""
    for alias in (row.first, row.second):
        for curve in record.rows(CURVES):
            if curve.model == alias and (curve.epsilon, row.attack) in ((row.epsilon, curve.attack), (0.0, "clean")):
                yield curve
                break


def _loss(alias: str, rows: Sequence[AttackCurveRow]) -> Finding | None:
    """The accuracy under the strongest attack at the smallest epsilon at which most of the clean accuracy is lost."""
    clean = next((row for row in rows if row.epsilon == 0), None)
    if clean is None:
        return None
    tried = [row for row in rows if row.norm == "linf" and row.epsilon > 0]
    lost = [row for row in tried if row.accuracy < clean.accuracy / 2]
    if not lost:
        return None
    row = min(lost, key=lambda row: (row.epsilon, row.accuracy))
    none = min((each for each in tried if each.accuracy == 0), key=lambda each: each.epsilon, default=None)
    end = ""
    if none is not None:
        end = "; none of it is left" + ("" if none is row else f" under {none.title} at {_where(none)}")
    return finding(
        f"**{alias}** loses more than half of its clean accuracy ({in_words(clean.estimate, with_n=False)}) under "
        f"{row.title} at {_where(row)}{end}.",
        row.estimate,
        kind="expected fact",
        reference=clean.accuracy,
        figure="curves",
        rows=(row, clean, *([none] if none is not None else [])),
    )


def _where(row: AttackCurveRow) -> str:
    return epsilon_words(row.epsilon, row.norm)
