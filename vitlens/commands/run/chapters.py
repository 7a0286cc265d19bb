"""Chapters: runs of other commands, each in its own folder within the folder of a larger run, which
reads them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read
from vitlens.errors import UnknownNameError
from vitlens.files import inside
from vitlens.record import Column, Contents, Record, col, read_run, table
from vitlens.report.claims import Claim, overall_verdict
from vitlens.report.document import Cell, Document, Section, Sentence
from vitlens.report.prose import say
from vitlens.report.sections import SAID, Report
from vitlens.typed import Name
from vitlens.uncertainty import Estimate

CHAPTERS_FOLDER: Final = "chapters"
_TABLES: Final = re.compile(r"(?<![\w/])tables/")  # of the chapter, where a text names one
_COMMANDS: Final = (  # whose runs can be chapters
    "train",
    "evaluate",
    "attention",
    "rollout",
    "stats",
    "ablate",
    "sae",
    "explain",
    "compare",
    "attack",
    "features",
    "profile",
)


@dataclass(frozen=True)
class ChapterRow:
    """One chapter.

    word: the command that made it.
    alias: the model that it is about; "" for all models.
    folder: its place in the folder of the larger run.
    cached: True if an earlier run had made it.
    part: its name, if the command has several chapters.
    seconds: time that it took when it was made.
    """

    word: Name = col("command")
    alias: str = col("model")
    folder: str = col("folder", unit="text")
    cached: bool = col("from the cache", default=False)
    part: str = col("part", default="")
    seconds: float = col("time", unit="s", default=0.0)


@dataclass(frozen=True)
class Chapter:
    """One chapter: its row in the larger run's record, and its own record, of which its report is
    made.
    """

    row: ChapterRow
    record: Any

    @cached_property
    def document(self) -> Document:
        """Return its report."""
        return COMMANDS[self.row.word].report(self.record)

    @property
    def name(self) -> str:
        """Return its command, or which one it is of several chapters of one command."""
        return self.row.part or self.row.word

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """Return all that its report claims."""
        report = COMMANDS[self.row.word].report
        if isinstance(report, Report):
            return report.register(self.record)
        return self.document.claims

    @cached_property
    def effects(self) -> tuple[Claim, ...]:
        """Return all effects that it measured, also those that are not significant."""
        report = COMMANDS[self.row.word].report
        if isinstance(report, Report):
            return tuple(report.effects(self.record))
        return ()

    @property
    def report(self) -> str:
        """Return its report.md, from the folder of the larger run."""
        return f"{self.row.folder}/report.md"

    def figure(self, name: str) -> str:
        """Return the name of one of its figures in the larger run; "" for none."""
        if not name:
            return ""
        chapter_folder = self.row.folder.rpartition("/")[2]
        return f"{chapter_folder.replace('-', '_', 1)}_{name}"

    def section(self, chart: str) -> Section | None:
        """Return the section of its report that holds a chart, or the first page as one where its
        picture is that chart.

        chart: the beginning of the figure's name; other figures of the section are left out. None:
        nothing has it.
        """
        document = self.document
        first = self.document.first
        if first.picture is not None and first.picture.name.startswith(chart):
            glance = () if first.glance is None else (first.glance,)
            page = Section("", first.answer, glance, (first.picture,))
            return self._placed(page, chart)
        for section in document.sections:
            if any(figure.name.startswith(chart) for figure in section.figures):
                return self._placed(section, chart)
        return None

    def _placed(self, section: Section, chart: str) -> Section:
        """Return a section whose figures have the larger run's names and are those of the chart
        alone; tables are named by their places in the chapter.
        """

        def placed(text: str) -> str:
            return _TABLES.sub(f"{self.row.folder}/tables/", text)

        sentences = [
            replace(sentence, text=placed(sentence.text)) for sentence in section.sentences
        ]
        figures = []
        for figure in section.figures:
            if figure.name.startswith(chart):
                renamed = replace(
                    figure,
                    name=self.figure(figure.name),
                    caption=placed(figure.caption),
                    chapter=(self.row.folder, figure.name),
                )
                figures.append(renamed)
        tables = [
            replace(chapter_table, caption=placed(chapter_table.caption))
            for chapter_table in section.tables
        ]
        return replace(
            section, sentences=tuple(sentences), figures=tuple(figures), tables=tuple(tables)
        )

    def glance(self, title: str) -> Mapping[str, Cell]:
        """Return a line of its first page's table by the titles of the columns.

        Returns nothing where there is none.
        """
        table = self.document.first.glance
        if table is None:
            return {}
        for row in table.rows:
            if row[0] == title:
                return dict(zip(table.columns, row))
        return {}


@dataclass(frozen=True)
class Question:
    """A question that chapters answer.

    names: the names of the chapters, the first that was run does.
    chart: the beginning of the name of the figure that shows it.
    about: the questions of the claims whose state it has, where not the chapter's own.
    """

    title: str
    names: tuple[str, ...]
    chart: str
    about: tuple[str, ...] = ()


def answer_sections(
    chapters: Sequence[Chapter], questions: Sequence[Question], claims: Sequence[Claim] = ()
) -> Iterator[Section]:
    """Yield a section for each question, from the report of each chapter of the first name that
    answers it: at most three sentences, one chart and one table, and the way to the chapter.
    """
    for question in questions:
        status = overall_verdict(claim for claim in claims if claim.question in question.about)
        answers = _answers(chapters, question)
        for chapter, section in answers:
            of_model = f" ({chapter.row.alias})" if len(answers) > 1 else ""
            yield replace(
                section,
                title=f"{question.title}{of_model}",
                sentences=_sentences(chapter, section, question.chart),
                tables=section.tables[:1],
                figures=section.figures[:1],
                panels=(),
                more=chapter.report,
                status=status or section.status,
            )


def _answers(chapters: Sequence[Chapter], question: Question) -> list[tuple[Chapter, Section]]:
    """Return the chapters of the first name that answers a question, each with its section."""
    for name in question.names:
        answers = []
        for chapter in chapters:
            if chapter.name != name:
                continue
            section = chapter.section(question.chart)
            if section is not None:
                answers.append((chapter, section))
        if answers:
            return answers
    return []


def _sentences(chapter: Chapter, section: Section, chart: str) -> tuple[Sentence, ...]:
    """Return the chapter's claims about a chart, then the section's sentences: at most SAID."""
    sentences: dict[str, Sentence] = {}
    for claim in chapter.claims:
        if claim.place == chart and claim.says:
            sentences[claim.says] = Sentence(claim.says)
    for sentence in section.sentences:
        sentences[sentence.text] = sentence
    return tuple(sentences.values())[:SAID]


def unlinked_sections(
    chapters: Sequence[Chapter], sections: Sequence[Section]
) -> Iterator[Section]:
    """Yield a section for each chapter of a run that was stopped that no other section leads to.

    sections: the other sections.
    """
    linked = {section.more for section in sections}
    for chapter in chapters:
        if chapter.report in linked:
            continue
        first = chapter.document.first
        title = say(
            "What did {{ word }} find{% if alias %} for {{ alias }}{% endif %}?",
            word=chapter.name,
            alias=chapter.row.alias,
        )
        glance = () if first.glance is None else (first.glance,)
        yield Section(title, first.answer[:SAID], glance, more=chapter.report)


@dataclass(frozen=True, kw_only=True)
class Chaptered(Record):
    """A run of chapters: it has the metrics of all of them, under the same names."""

    chapters: tuple[ChapterRow, ...] = table()

    @cached_property
    def parts(self) -> tuple[Chapter, ...]:
        """Return the chapters with their records.

        Raises UnknownNameError for a command that is no chapter.
        """
        for row in self.chapters:
            if row.word not in _COMMANDS:
                raise UnknownNameError("chapter", row.word, _COMMANDS)
        parts = []
        for row in self.chapters:
            folder = inside(self.folder, row.folder)
            parts.append(Chapter(row, read(read_run(folder))))
        return tuple(parts)

    def of(self, word: str) -> tuple[Chapter, ...]:
        """Return the chapters of one command."""
        return tuple(chapter for chapter in self.parts if chapter.row.word == word)

    def about(self, word: str, alias: str) -> Chapter | None:
        """Return the chapter of one command about one model."""
        return next((chapter for chapter in self.of(word) if chapter.row.alias == alias), None)

    @property
    def hardware(self) -> str:
        """Return the machine of the chapter that recorded it."""
        for chapter in self.parts:
            if chapter.record.hardware:
                return str(chapter.record.hardware)
        return ""

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """Return its own metrics and the chapters'.

        Where two have the same one, the first's, as later ones use fewer images.
        """
        metrics = dict(super().metrics)
        for chapter in self.parts:
            if chapter.row.word == "train":  # evaluate measures the same
                continue
            record = chapter.record
            predicted = record.options.get("predicted", False)
            for name, number in record.metrics.items():
                if predicted and name.startswith("accuracy/"):  # 1 by construction
                    continue
                metrics.setdefault(name, number)
        return metrics

    def column(self, name: str) -> Column | None:
        """Return the column that declares a metric, its own or a chapter's; first one that says
        what is better.
        """
        columns: list[Column | None] = [super().column(name)]
        for chapter in self.parts:
            columns.append(chapter.record.column(name))
        declared = [column for column in columns if column is not None]
        judged = [column for column in declared if column.better is not None]
        if judged:
            return judged[0]
        return declared[0] if declared else None

    @classmethod
    def contents(cls) -> Contents:
        """Return what it writes: the metrics of every command that can be a chapter, too."""
        contents = super().contents()
        metrics = dict.fromkeys(contents.metrics)
        for word in _COMMANDS:
            metrics |= dict.fromkeys(COMMANDS[word].contents.metrics)
        return replace(contents, metrics=tuple(metrics))
