"""Verdicts, findings, next steps and the consistency pass, and a run with other chapters."""

from dataclasses import replace

from vitlens.commands.run.chapters import Chapter
from vitlens.commands.run.consistency import bare_statuses, errors, reconciled
from vitlens.commands.shared.label_rows import rest_words
from vitlens.record import Record
from vitlens.report.findings import AUC, largest, size_of
from vitlens.report.next_steps import NEXT_STEPS, command_of, needs_a_next_step, next_step
from vitlens.report.verdicts import Verdict

__all__ = [
    "AUC",
    "NEXT_STEPS",
    "Verdict",
    "bare_statuses",
    "command_of",
    "errors",
    "largest",
    "needs_a_next_step",
    "next_step",
    "reconciled",
    "rest_words",
    "size_of",
    "with_chapter",
]


def with_chapter(study: Record, word: str, **changes: object) -> Record:
    """Return a copy of a study in one of whose chapters these fields differ."""
    parts = []
    for part in study.parts:
        if part.row.word == word:
            part = Chapter(part.row, replace(part.record, **changes))
        parts.append(part)
    copy = replace(study)
    vars(copy)["parts"] = tuple(parts)  # in place of those of its folder
    return copy
