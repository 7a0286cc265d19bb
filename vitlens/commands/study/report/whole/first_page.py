"""The first page of a study: the verdicts of all chapters, and the findings of the highest rank."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import MOST

_OF_A_CHAPTER: Final = 2  # findings, at most
# subjects of verdicts in the order of the page; others follow
SUBJECTS: Final = ("accuracy", "calibration", "explanation", "robustness", "common corruptions", "attention health")
_SKIPPED: Final = ("train",)  # evaluate judges the same models on the same images


def verdicts(study: Study) -> Iterator[Verdict]:
    """One verdict a subject: the first chapter's that tested it."""
    known: dict[str, Verdict] = {}
    for chapter in study.chapters:
        if chapter.row.word not in _SKIPPED:
            for verdict in chapter.document.verdicts:
                alias = chapter.row.alias
                if alias and not verdict.subject.endswith(alias):
                    verdict = replace(verdict, subject=f"{verdict.subject} of {alias}")
                before = known.get(verdict.subject)
                if before is None or (before.state == "not tested" and verdict.state != "not tested"):
                    known[verdict.subject] = verdict
    yield from sorted(known.values(), key=lambda verdict: _place(verdict.subject))


def _place(subject: str) -> int:
    return next((index for index, word in enumerate(SUBJECTS) if subject.startswith(word)), len(SUBJECTS))


def findings(study: Study) -> tuple[Finding, ...]:
    """The findings of the highest rank, each fact once and at most _OF_A_CHAPTER of a chapter."""
    best: dict[tuple[float, int | None, str], Finding] = {}
    for chapter in study.chapters:
        for finding in chapter.document.findings[:_OF_A_CHAPTER] if chapter.row.word not in _SKIPPED else ():
            fact = (round(abs(finding.effect.value), 6), finding.effect.n, finding.effect.unit)
            if fact not in best or finding.rank > best[fact].rank:
                best[fact] = chapter.finding(finding)
    return tuple(sorted(best.values(), key=lambda finding: -finding.rank)[:MOST])
