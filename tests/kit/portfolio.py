"""Where the numbers and sentences of a portfolio report come from."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.kit.select import values_of
from vitlens.commands.study.portfolio import METHOD_TEXTS, portfolio
from vitlens.commands.study.record import StudyRecord
from vitlens.commands.study.report import WHOLE
from vitlens.commands.study.works import sections as sections_of_works
from vitlens.report.document import Section
from vitlens.report.literature import works
from vitlens.report.markdown import figures_shown, markdown
from vitlens.report.numbers import in_time

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# what is no statement: code, links and pictures, headings, and the numbers of figures
_NO_STATEMENT = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^#+ .*$|\*Figure \d+\.", re.MULTILINE)


def numbers_of(text: str) -> set[str]:
    """Return the numbers that a text states."""
    return set(_NUMBER.findall(_NO_STATEMENT.sub(" ", text)))


def known_numbers(record: StudyRecord) -> set[str]:
    """Return the numbers of all claims, effects, sections and settings of a study's chapters."""
    texts = [markdown(WHOLE(record), record), *METHOD_TEXTS]
    for chapter in record.parts:
        texts.append(markdown(chapter.document, chapter.record))
        texts.append(in_time(chapter.row.seconds))
        for claim in (*chapter.claims, *chapter.effects):
            texts += [claim.says, claim.brief, claim.because]
        data = chapter.record.config.data
        if data is not None:
            texts.append(f"{data.images:,} {data.classes} {data.size[0]} {data.size[1]}")
    for row in record.training:
        for value in vars(row).values():
            if isinstance(value, int):
                texts.append(f"{value:,}")
    for work in works():
        texts += [work.cited, work.entry]
    return numbers_of("\n".join(texts))


def known_sentences(record: StudyRecord) -> set[str]:
    """Return every sentence that a chapter states, in a claim or in a section."""
    texts: list[str] = []
    sections = list(sections_of_works(record))
    for chapter in record.parts:
        texts += values_of(chapter.claims, "says")
        texts += values_of(chapter.document.first.answer, "text")
        sections += chapter.document.sections
    return {*texts, *sentences_of(sections)}


def sentences_of(sections: Iterable[Section]) -> list[str]:
    """Return the sentences of sections, in their order."""
    texts: list[str] = []
    for section in sections:
        texts += values_of(section.sentences, "text")
    return texts


def headings(path: Path, level: int = 2) -> Iterator[str]:
    """Yield the headings of one level of a markdown file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{'#' * level} "):
            yield line.lstrip("# ")


def drawn_in(path: Path) -> tuple[str, ...]:
    """Return the names of the figures of a markdown file."""
    return figures_shown(path.read_text(encoding="utf-8"))


def sentences_between(record: StudyRecord, first: str, last: str) -> list[str]:
    """Return the sentences of a portfolio from one heading up to another."""
    sections = portfolio(record).sections
    titles = values_of(sections, "title")
    return sentences_of(sections[titles.index(first) : titles.index(last)])
