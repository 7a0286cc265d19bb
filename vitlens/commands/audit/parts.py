"""The chapters of an audit as its report reads them: each with its record and its own document; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters.record import ChapterRow, chapters_of
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Verdict


@dataclass(frozen=True)
class AuditPart:
    """One chapter: its row in the audit's record, its own record and its own document."""

    row: ChapterRow
    record: Any
    document: Document

    @property
    def name(self) -> str:
        """Its command, or which one of several chapters of a command it is."""
        return self.row.part or self.row.word

    def placed(self, figure: FigureSpec) -> FigureSpec:
        """A figure of the chapter as the audit shows it, under a name of its own."""
        return replace(figure, name=self.figure_name(figure.name), chapter=(self.row.folder, figure.name))

    def figure_name(self, name: str) -> str:
        """The name of a figure of the chapter in the audit; "" for none."""
        return f"{self.name}_{name}" if name else ""

    def verdict(self, subject: str) -> Verdict | None:
        """The chapter's verdict on a subject ("calibration"), if it gives one."""
        return next((each for each in self.document.verdicts if each.subject.startswith(subject)), None)


Parts: TypeAlias = Mapping[str, AuditPart]


def parts_of(record: Record) -> Parts:
    """The chapters that were run, by name."""
    parts = (AuditPart(row, chapter, COMMANDS[row.word].report(chapter)) for row, chapter in chapters_of(record))
    return {part.name: part for part in parts}
