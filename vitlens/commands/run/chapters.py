"""Chapters: runs of other commands in the folder of a larger run, as its report reads them.

`Chaptered` is the record of the larger run, and `Chapter` one of its parts. A report shows chapters
as answers to questions (`answer_sections`), and links the others (`unlinked_sections`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

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

# where a text names a table of the chapter; not in a longer path
_TABLES: Final = re.compile(r"(?<![\w/])tables/")
# commands with runs that can be chapters
_COMMANDS: Final = (
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
    """One chapter of a larger run.

    row: its row in the larger run's record.
    record: its own record, from which its report is made.
    """

    row: ChapterRow
    record: Any

    @cached_property
    def document(self) -> Document:
        """Return its report."""
        return COMMANDS[self.row.word].report(self.record)

    @property
    def name(self) -> str:
        """Return its part, if its command has several chapters, else its command."""
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
        """Return the name of one of its figures in the larger run; "" for ""."""
        if not name:
            return ""
        folder_name = self.row.folder.rpartition("/")[2]  # WORD-PART-ALIAS
        return f"{folder_name.replace('-', '_', 1)}_{name}"

    def section(self, chart_prefix: str) -> Section | None:
        """Return the section of its report that has a chart, without its other figures.

        The first page counts as a section if its picture is that chart. Returns None if no section
        has it.

        chart_prefix: the beginning of the figure's name.
        """
        document = self.document
        first = document.first
        if first.picture is not None and first.picture.name.startswith(chart_prefix):
            glance = () if first.glance is None else (first.glance,)
            page = Section("", first.answer, tables=glance, figures=(first.picture,))
            return self._in_larger_run(page, chart_prefix)
        for section in document.sections:
            if any(figure.name.startswith(chart_prefix) for figure in section.figures):
                return self._in_larger_run(section, chart_prefix)
        return None

    def _in_larger_run(self, section: Section, chart_prefix: str) -> Section:
        """Return a section with the paths and figure names of the larger run.

        Of its figures, only those with names that begin so are kept.
        """

        def with_paths(text: str) -> str:
            return _TABLES.sub(f"{self.row.folder}/tables/", text)

        sentences = []
        for sentence in section.sentences:
            sentences.append(replace(sentence, text=with_paths(sentence.text)))
        figures = []
        for figure in section.figures:
            if figure.name.startswith(chart_prefix):
                renamed = replace(
                    figure,
                    name=self.figure(figure.name),
                    caption=with_paths(figure.caption),
                    chapter=(self.row.folder, figure.name),
                )
                figures.append(renamed)
        tables = []
        for section_table in section.tables:
            tables.append(replace(section_table, caption=with_paths(section_table.caption)))
        return replace(
            section, sentences=tuple(sentences), figures=tuple(figures), tables=tuple(tables)
        )

    def glance(self, title: str) -> Mapping[str, Cell]:
        """Return the line with this title of its first page's table, by the titles of the columns.

        Returns an empty mapping where there is none.
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

    names: the names of chapters; the first that was run answers it.
    chart: the beginning of the name of the figure that shows the answer, and the place of claims
        about it.
    about: the questions of the claims that decide its state; () for the state of the chapter's
        section.
    """

    title: str
    names: tuple[str, ...]
    chart: str
    about: tuple[str, ...] = ()


def answer_sections(
    chapters: Sequence[Chapter], questions: Sequence[Question], claims: Sequence[Claim] = ()
) -> Iterator[Section]:
    """Yield a section for each question, or one for each model if there is a chapter of each.

    A section has at most SAID sentences, one chart, one table, and a link to the chapter.
    """
    for question in questions:
        status = overall_verdict(claim for claim in claims if claim.question in question.about)
        answers = _answers(chapters, question)
        for chapter, section in answers:
            title = question.title
            if len(answers) > 1:
                title = f"{title} ({chapter.row.alias})"
            yield replace(
                section,
                title=title,
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
    sentences: dict[str, Sentence] = {}  # by text, so that each is said once
    for claim in chapter.claims:
        if claim.place == chart and claim.says:
            sentences[claim.says] = Sentence(claim.says)
    for sentence in section.sentences:
        sentences[sentence.text] = sentence
    return tuple(sentences.values())[:SAID]


def unlinked_sections(
    chapters: Sequence[Chapter], sections: Sequence[Section]
) -> Iterator[Section]:
    """Yield a section for each chapter to which no other section links.

    Only a run that was stopped has such chapters.

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
        yield Section(title, first.answer[:SAID], tables=glance, more=chapter.report)


@dataclass(frozen=True, kw_only=True)
class Chaptered(Record):
    """A run of chapters: it has the metrics of all of them, under the same names.

    commands: those with runs that can be chapters.
    """

    commands: ClassVar[tuple[str, ...]] = _COMMANDS

    chapters: tuple[ChapterRow, ...] = table()

    @cached_property
    def parts(self) -> tuple[Chapter, ...]:
        """Return the chapters with their records.

        Raises UnknownNameError for a command that is no chapter.
        """
        for row in self.chapters:
            if row.word not in self.commands:
                raise UnknownNameError("chapter", row.word, self.commands)
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
        for chapter in self.of(word):
            if chapter.row.alias == alias:
                return chapter
        return None

    @property
    def hardware(self) -> str:
        """Return the machine of the chapter that recorded it."""
        for chapter in self.parts:
            if chapter.record.hardware:
                return str(chapter.record.hardware)
        return ""

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """Return its own metrics and those of the chapters.

        Of a metric of several chapters, the first one counts, as later ones use fewer images.
        """
        metrics = dict(super().metrics)
        for chapter in self.parts:
            for name, number in self.metrics_of(chapter).items():
                metrics.setdefault(name, number)
        return metrics

    def metrics_of(self, chapter: Chapter) -> Mapping[str, Estimate]:
        """Return the metrics of a chapter that are those of the whole run, too."""
        if chapter.row.word == "train":  # evaluate measures the same
            return {}
        metrics = dict(chapter.record.metrics)
        if chapter.record.options.get("predicted", False):  # accuracy is 1 by construction
            for name in chapter.record.metrics:
                if name.startswith("accuracy/"):
                    del metrics[name]
        return metrics

    def column(self, name: str) -> Column | None:
        """Return the column that declares a metric, in its own tables or those of a chapter.

        Of several, the first that says what is better counts.
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
        for word in cls.commands:
            metrics |= dict.fromkeys(COMMANDS[word].contents.metrics)
        return replace(contents, metrics=tuple(metrics))
