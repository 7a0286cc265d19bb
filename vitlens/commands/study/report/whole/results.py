"""The results of a study, one section a question: the answer of a chapter, its two best figures and one table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vitlens.commands.study.report.whole.chapters import Chapter, Study
from vitlens.commands.study.report.whole.heads import head_board, head_table
from vitlens.report.document import ImagePanel, Section, Sentence
from vitlens.report.layout import FIGURES, METHODS

_SENTENCES: Final = 6  # of a section, at most


@dataclass(frozen=True)
class Question:
    """A question that chapters of one command answer.

    figures: beginnings of the names of the figures that show it best, in order; section: words in the title of the
    chapter's section that holds the answer ("" for its first one).
    """

    title: str
    word: str
    figures: tuple[str, ...] = ()
    section: str = ""


_QUESTIONS: Final = (
    Question("How good are the models, and which is better?", "evaluate", ("calibration", "confusion")),
    Question("How does attention develop over the layers?", "attention", ("development",), "develops"),
    Question("Does attention over all layers lie on the object?", "rollout"),
    Question("What do the heads do?", "stats", ("specialisation",)),
    Question("Which heads matter?", "ablate"),
    Question("Which map can be trusted?", "explain"),
    Question("How does the ViT differ from the CNN?", "compare", ("panels", "errors")),
    Question("Why do the models fail?", "compare", ("failure_examples",), "misclassified"),
    Question("How do they break?", "attack", ("curves", "corruptions")),
    Question("What do the features know?", "features", ("depth",)),
    Question("What do they cost?", "profile"),
)


def results(study: Study) -> Iterator[Section]:
    """The sections in the order of the questions; a question without a chapter is left out."""
    for question in _QUESTIONS:
        chapters = list(study.of(question.word))
        for chapter in chapters:
            section = _answer(question, chapter, several=len(chapters) > 1)
            if section is not None:
                yield _with_heads(study, chapter.row.alias, section) if question.word == "ablate" else section


def _with_heads(study: Study, alias: str, section: Section) -> Section:
    """The section on ablation, which begins with the head board and its numbers."""
    boards, table = tuple(head_board(study, alias)), head_table(study, alias)
    figures = (*boards, *section.figures[: max(0, FIGURES - len(boards))])
    return replace(section, figures=figures, tables=(*([table] if table else []), *section.tables))


def _answer(question: Question, chapter: Chapter, *, several: bool) -> Section | None:
    document = chapter.document
    sections = [section for section in document.sections if section.title != METHODS]
    if question.section:
        sections = [section for section in sections if question.section in section.title]
    if not sections:
        return None
    first = sections[0]
    drawn = [figure for section in sections for figure in section.figures]
    if not question.section:
        drawn += [figure for section in document.appendix for figure in section.figures]
    ranked = sorted(drawn, key=lambda figure: _rank(figure.name, question.figures))
    tables = [table for section in sections for table in section.tables]
    name = chapter.row.alias or {"attack-cw": "C&W"}.get(chapter.row.folder.rpartition("/")[2], "")
    of = f" ({name})" if several and name else ""
    return Section(
        f"{question.title}{of}",
        tuple(_answers(first))[:_SENTENCES],
        tuple(tables[:1]),
        tuple(chapter.figure(figure) for figure in ranked[:FIGURES]),
        question.title,
        leading=True,
        panels=_panels(sections) if any(each.sheet for each in ranked[:FIGURES]) else (),
    )


def _panels(sections: Sequence[Section]) -> tuple[ImagePanel, ...]:
    return next((section.panels for section in sections if section.panels), ())


def _answers(section: Section) -> Iterator[Sentence]:
    return (sentence for sentence in section.sentences if sentence.says == "result")


def _rank(name: str, wanted: tuple[str, ...]) -> int:
    return next((index for index, word in enumerate(wanted) if name.startswith(word)), len(wanted))
