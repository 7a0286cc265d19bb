"""The first page of a study: the verdicts of all chapters, and the findings of the highest rank."""

from collections.abc import Iterator
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
                before = known.get(verdict.subject)
                if before is None or (before.state == "not tested" and verdict.state != "not tested"):
                    known[verdict.subject] = verdict
    yield from sorted(known.values(), key=lambda verdict: _place(verdict.subject))


def _place(subject: str) -> int:
    return next((index for index, word in enumerate(SUBJECTS) if subject.startswith(word)), len(SUBJECTS))


def findings(study: Study) -> tuple[Finding, ...]:
    """The findings of the highest rank, each fact once and at most _OF_A_CHAPTER of a chapter."""
    kept: list[Finding] = []
    seen: set[tuple[float, int | None, str]] = set()
    for chapter in study.chapters:
        own = 0
        for finding in chapter.document.findings if chapter.row.word not in _SKIPPED else ():
            fact = (round(finding.effect.value, 6), finding.effect.n, finding.effect.unit)
            if own < _OF_A_CHAPTER and fact not in seen:
                seen.add(fact)
                kept.append(chapter.finding(finding))
                own += 1
    return tuple(sorted(kept, key=lambda finding: -finding.rank)[:MOST])
