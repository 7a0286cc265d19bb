"""Verdicts and findings of `vitlens audit`: those of its chapters, and what the audit alone can judge."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vitlens.commands.audit.options import AuditOptions
from vitlens.commands.audit.parts import AuditPart, Parts
from vitlens.commands.audit.record import UNTESTED
from vitlens.commands.run.requirements import RequirementOutcome, outcomes, requirements_of
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, State, Verdict
from vitlens.report.findings import ranked
from vitlens.report.verdicts import Threshold
from vitlens.uncertainty import Estimate

# corruptions that add 10 points of errors pass and 30 warn, as they do for a model whose clean error is 10 %
CONSISTENCY: Final = Threshold(0.9, 0.7, higher=True)  # share of predictions that corruptions leave as they are
FEW: Final = 30  # images below which that share is not judged
EACH: Final = 2  # findings of one chapter
_CURVES: Final = "curves"  # the figure of findings on attacks
_OWN: Final = ("robustness", "common corruptions")  # subjects of attack's chapters that are placed by hand


def verdicts(record: Record, parts: Parts) -> Iterator[Verdict]:
    """Accuracy, calibration, explanation, robustness, common corruptions and attention health, in this order."""
    yield _accuracy(record, parts)
    yield _of_chapter(record, parts, "evaluate", "calibration")
    yield _of_chapter(record, parts, "explain", "explanation")
    yield _robustness(record, parts)
    strongest = parts.get("attack") or parts.get("corruptions")
    if strongest is not None:
        yield from (each for each in strongest.document.verdicts if not each.subject.startswith(_OWN))
    yield _corruptions(record, parts)
    yield _of_chapter(record, parts, "stats", "attention health")
    if "stats" in parts:
        more = (each for each in parts["stats"].document.verdicts if not each.subject.startswith("attention health"))
        yield from more


def findings(parts: Parts) -> tuple[Finding, ...]:
    """The findings of the chapters, at most EACH of one, ranked together.

    Those on FGSM are left out where a stronger attack was run.
    """
    found: list[Finding | None] = []
    for part in parts.values():
        own = part.document.findings
        if part.name == "corruptions" and "attack" in parts:
            own = tuple(each for each in own if each.figure != _CURVES)
        found += [replace(each, figure=part.figure_name(each.figure)) for each in own[:EACH]]
    return ranked(found)


def requirement_outcomes(record: Record) -> tuple[RequirementOutcome, ...]:
    """What became of --at-least and --at-most."""
    run = record.options(AuditOptions).run
    return tuple(outcomes(requirements_of(run.at_least, run.at_most), record))


def is_predicted(parts: Parts) -> bool:
    """Whether predictions were used as labels."""
    return "evaluate" not in parts


def consistency(part: AuditPart) -> Estimate | None:
    """The share of predictions that stay the same under corruptions, where these were the labels."""
    error = part.record.metrics.get(f"mean_error_on_corruptions/{part.record.aliases[0]}")
    if error is None:
        return None
    low, high = (None if end is None else 1 - end for end in (error.high, error.low))
    return Estimate(1 - error.value, low, high, error.n)


def _accuracy(record: Record, parts: Parts) -> Verdict:
    (alias,) = record.aliases
    subject = f"accuracy of {alias}"
    if "evaluate" not in parts:
        return rules.not_tested(subject, _reason(record, "evaluate"))
    own = record.metric(f"accuracy/{alias}")
    asked = [each for each in requirement_outcomes(record) if each.metric == f"accuracy/{alias}"]
    if not asked:
        because = "top-1 accuracy; no other model to judge it by: add --at-least accuracy=VALUE"
        return rules.not_tested(subject, because, value=own)
    state: State = "pass" if all(each.holds for each in asked) else "fail"
    return Verdict(subject, state, own, _asked(asked), "top-1 accuracy")


def _asked(judged: Sequence[RequirementOutcome]) -> str:
    return ", ".join(f"{each.requirement.bound} {100 * each.requirement.value:g} %" for each in judged)


def _of_chapter(record: Record, parts: Parts, name: str, subject: str) -> Verdict:
    """A chapter's verdict on a subject; not tested where the chapter was not run, or gives none."""
    title = f"{subject} of {record.aliases[0]}"
    if name not in parts:
        return rules.not_tested(title, _reason(record, name))
    silent = f"vitlens {parts[name].row.word} gives no verdict on it"
    return parts[name].verdict(subject) or rules.not_tested(title, silent)


def _robustness(record: Record, parts: Parts) -> Verdict:
    """Of the strongest attack. Where FGSM alone fits the budget, it can show a model to be weak, not robust."""
    if "attack" in parts:
        verdict = _of_chapter(record, parts, "attack", "robustness")
    else:
        verdict = _of_chapter(record, parts, "corruptions", "robustness")
        if verdict.state in ("pass", "warn"):
            because = f"{verdict.because}: no attack of several steps fits --budget, and one step shows no robustness"
            verdict = replace(verdict, state="inconclusive", because=because)
    if is_predicted(parts) and verdict.state != "not tested":
        verdict = replace(verdict, because=f"{verdict.because}; of its predictions, as no labels were used")
    return verdict


def _corruptions(record: Record, parts: Parts) -> Verdict:
    verdict = _of_chapter(record, parts, "corruptions", "common corruptions")
    stay = consistency(parts["corruptions"]) if is_predicted(parts) and "corruptions" in parts else None
    if stay is None:
        return verdict
    because = "predictions that stay the same, mean over all kinds and severities, as no labels were used"
    if (stay.n or 0) < FEW:
        return rules.inconclusive(verdict.subject, stay, CONSISTENCY, f"{because}, of fewer than {FEW} images")
    return rules.judged(verdict.subject, stay, CONSISTENCY, because)


def _reason(record: Record, name: str) -> str:
    return next((row.reason for row in record.rows(UNTESTED) if row.part == name), "its chapter was not run")
