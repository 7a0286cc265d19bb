"""The chapters of a whole study as its report reads them: records, documents, and figures under the study's names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters.record import ChapterRow, chapters_of
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Finding, Section
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Chapter:
    """One chapter: its row in the study's record, its own record and its report."""

    row: ChapterRow
    record: Any

    @cached_property
    def document(self) -> Document:
        """Its report, laid out."""
        return COMMANDS[self.row.word].report(self.record)

    @property
    def name(self) -> str:
        """Its name in figures: "attention_vit-micro"."""
        return self.row.folder.rpartition("/")[2].replace("-", "_", 1)

    def figure(self, figure: FigureSpec) -> FigureSpec:
        """A figure under the study's name of it."""
        return replace(figure, name=f"{self.name}_{figure.name}", chapter=(self.row.folder, figure.name))

    def finding(self, finding: Finding) -> Finding:
        """A finding, with the study's name of its figure."""
        return replace(finding, figure=f"{self.name}_{finding.figure}" if finding.figure else "")

    def placed(self, section: Section, title: str) -> Section:
        """A section under another title, its figures under the study's names."""
        return replace(section, title=title, figures=tuple(map(self.figure, section.figures)))


@dataclass(frozen=True)
class Study:
    """A study's record and its chapters in their order."""

    record: Record
    chapters: tuple[Chapter, ...]

    @classmethod
    def read(cls, record: Record) -> "Study":
        """All chapters of a study's folder. Raises UnknownNameError for a command that is no chapter."""
        return cls(record, tuple(Chapter(row, chapter) for row, chapter in chapters_of(record)))

    def of(self, word: str) -> Iterator[Chapter]:
        """The chapters of one command."""
        return (chapter for chapter in self.chapters if chapter.row.word == word)

    def about(self, word: str, alias: str) -> Chapter | None:
        """The chapter of one command about one model."""
        return next((chapter for chapter in self.of(word) if chapter.row.alias == alias), None)

    @property
    def vits(self) -> tuple[str, ...]:
        """The models whose attention is analysed."""
        return tuple(dict.fromkeys(chapter.row.alias for chapter in self.of("attention")))

    @cached_property
    def families(self) -> Mapping[str, str]:
        """The family of each model, by alias: "vit", "windowed", "cnn" or "other"."""
        return {model.alias: model.family for chapter in self.chapters for model in chapter.record.models}

    @property
    def pair(self) -> tuple[str, str] | None:
        """The first model whose attention is analysed, and the first CNN."""
        cnns = [alias for alias, family in self.families.items() if family == "cnn" and alias not in self.vits]
        return (self.vits[0], cnns[0]) if self.vits and cnns else None

    def metric(self, name: str) -> Estimate | None:
        """A metric of the chapters, None where there is none."""
        return self.record.metrics.get(name)
