"""A whole report as one HTML file."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import quote

from vitlens.files import named_file
from vitlens.record import Record
from vitlens.report.document import Document, FigureSpec, ImagePanel, Section, Sentence, Table, Tags
from vitlens.report.glossary import Term
from vitlens.report.html import pictures
from vitlens.report.html.fragment import ExplorerPart, explorer_part
from vitlens.report.html.packing import BUDGET
from vitlens.report.html.templates import POLICY, asset, rendered
from vitlens.report.html.text import Words, command_without_paths, plain
from vitlens.report.markdown import UNFINISHED, citation, provenance, repeated_words
from vitlens.report.numbers import in_time, in_words
from vitlens.safe_paths import inside
from vitlens.version import __version__

_OPEN: Final = 40  # rows of a table that is open at first
_FILTERED: Final = 4  # figures and panels of a section from which on it has a filter
_SIZE: Final = 11_500_000  # bytes of a page with figures and weights
_LEAST: Final = 3_000_000  # bytes for weights, however many figures there are
_PANEL: Final = 160  # px, the longer side of a panel's pictures
_TAGS: Final = {
    "Outcome": ("outcome", "outcome"),
    "Class": ("class_name", "class"),
    "Agreement": ("agreement", "agreement"),
}


@dataclass(frozen=True)
class _Shown:
    """Something that a filter finds: its words in lower case, and its tags."""

    text: str
    outcome: str
    class_name: str
    agreement: str


@dataclass(frozen=True)
class _Figure(_Shown):
    number: int
    picture: pictures.Embedded | None
    caption: str
    alt: str


@dataclass(frozen=True)
class _Panel(_Shown):
    title: str
    pictures: tuple[tuple[pictures.Embedded, str], ...]


@dataclass(frozen=True)
class _Table:
    """right: the columns of numbers; name: the caption as plain text; open: whether it is shown at first."""

    caption: str
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]
    open: bool


@dataclass(frozen=True)
class _Section:
    """filters: the title, the field and the values of each tag by which its figures and panels differ."""

    anchor: str
    title: str
    sentences: tuple[Sentence, ...]
    tables: tuple[_Table, ...]
    figures: tuple[_Figure, ...]
    panels: tuple[_Panel, ...]
    filters: tuple[tuple[str, str, tuple[str, ...]], ...] | None
    holds: str
    step: bool
    status: str
    more: str

    @property
    def shown_anchor(self) -> str:
        return f"{self.anchor}-shown"

    @property
    def panels_anchor(self) -> str:
        return f"{self.anchor}-panels"


class _Page:
    """What the parts of one page share: numbers of figures, terms that were explained, anchors that are taken."""

    def __init__(self, document: Document, folder: Path) -> None:
        self.document, self.folder = document, folder
        self.numbers = {figure.name: number for number, figure in enumerate(document.figures, start=1)}
        self.words = Words()
        self._anchors: set[str] = set()
        self._drawn: set[str] = set()

    def picture(self) -> _Figure | None:
        """The picture of the first page."""
        picture = self.document.first.picture
        return None if picture is None else self._figure(picture)

    def section(self, section: Section) -> _Section:
        """One section: its figures as pictures, its panels instead of the sheets of these."""
        figures = tuple(self._figure(each) for each in section.figures if not (each.sheet and self._has_panels))
        panels = tuple(map(_panel, section.panels))
        tables = tuple(map(_table, section.tables))
        return _Section(
            self._anchor(section.title),
            plain(section.title),
            section.sentences,
            tables,
            figures,
            panels,
            _filters(figures, panels),
            _counted(figure=len(figures), panel=len(panels), table=len(tables)),
            section.step,
            section.status,
            quote(section.more),
        )

    @property
    def _has_panels(self) -> bool:
        return any(section.panels for section in self.document.sections)

    def _figure(self, figure: FigureSpec) -> _Figure:
        path = inside(self.folder, "figures", named_file(figure.name, ".png"))
        alt = plain(figure.alt or figure.caption)
        return _Figure(
            **_found_by(figure.tags, figure.name.replace("_", " "), plain(figure.caption)),
            number=self.numbers[figure.name],
            picture=pictures.figure(path) if path.is_file() else None,
            caption=figure.caption,
            alt=alt,
        )

    def answer(self) -> Iterator[tuple[Sentence, int | None]]:
        """The sentences of the first page, with the number of the figure that shows each."""
        return ((each, self._linked(each.place)) for each in self.document.first.answer)

    def _linked(self, name: str) -> int | None:
        sheet = next((figure.sheet for figure in self.document.figures if figure.name == name), True)
        return None if sheet and self._has_panels else self.numbers.get(name)

    def _anchor(self, title: str) -> str:
        stem = re.sub(r"[^a-z0-9]+", "-", plain(title).lower())[:60].strip("-") or "part"
        anchor = next(name for name in _numbered(f"s-{stem}") if name not in self._anchors)
        self._anchors.add(anchor)
        return anchor


def page(document: Document, record: Record, folder: Path, *, seconds: float | None = None) -> str:
    """The whole file: the first page, the attention explorer, sections, folded parts and the glossary.

    record: whose settings and models are listed; folder: whose figures/ hold the figures, drawn before; seconds: that
    the run took. No absolute path of the machine is in it, and it fetches nothing (POLICY).
    """
    parts = _Page(document, folder)
    sections = tuple(map(parts.section, document.sections))
    values = {
        "title": plain(document.title),
        "command": record.command,
        "version": __version__,
        "policy": POLICY,
        "style": asset("style.css"),
        "page_script": asset("page.js"),
        "explorer_script": asset("explorer.js"),
        "words": parts.words,
        "in_words": in_words,
        "unfinished": UNFINISHED.get(record.status, ""),
        "preface": document.preface,
        "first": document.first,
        "answer": tuple(parts.answer()),
        "picture": parts.picture(),
        "glance": None if document.first.glance is None else _table(document.first.glance),
        "folded": tuple(map(parts.section, document.folded)),
        "explorer": _explorer(document, sections),
        "sections": sections,
        "terms": _terms(document),
        "command_line": command_without_paths(record.config.command_line),
        "took": in_time(seconds) if record.status == "done" and seconds is not None else "",
        "repeated": plain(repeated_words(record, seconds)),
        "models": tuple(map(provenance, record.models)),
        "citation": plain(citation(record)),
    }
    return rendered("page.html.jinja", **values, contents=tuple(_contents(values, sections)))


def _explorer(document: Document, sections: tuple[_Section, ...]) -> ExplorerPart | None:
    """The attention explorer, its weights in what the page's figures leave of _SIZE."""
    if document.explorer is None:
        return None
    taken = sum(
        len(picture.uri)
        for section in sections
        for picture in (
            *(figure.picture for figure in section.figures if figure.picture),
            *(picture for panel in section.panels for picture, _ in panel.pictures),
        )
    )
    return explorer_part(document.explorer, budget=max(_LEAST, min(BUDGET, _SIZE - taken)))


def _contents(values: Mapping[str, object], sections: tuple[_Section, ...]) -> Iterator[tuple[str, str]]:
    """Anchors and headings of the parts that are there."""
    if values["explorer"]:
        yield "explorer", "Attention explorer"
    yield from ((section.anchor, section.title) for section in sections)
    if values["terms"]:
        yield "glossary", "Glossary"
    yield "repeat-it", "Repeat it"


def _table(table: Table) -> _Table:
    right = [all(isinstance(cell, (int, float, type(None))) for cell in column) for column in zip(*table.rows)]
    rows = tuple(tuple(map(in_words, row)) for row in table.rows)
    return _Table(table.caption, plain(table.caption), table.columns, rows, tuple(right), len(rows) <= _OPEN)


def _panel(panel: ImagePanel) -> _Panel:
    captions = tuple(map(plain, panel.captions))
    drawn = tuple(pictures.photograph(pixels, most=_PANEL) for pixels in panel.pictures())
    title = plain(panel.title)
    return _Panel(
        **_found_by(panel.tags, title, *captions), title=title, pictures=tuple(zip(drawn, captions, strict=True))
    )


def _found_by(tags: Tags, *texts: str) -> dict[str, str]:
    outcome, class_name, agreement = map(plain, (tags.outcome, tags.class_name, tags.agreement))
    return {
        "text": " ".join((*texts, outcome, class_name, agreement)),
        "outcome": outcome,
        "class_name": class_name,
        "agreement": agreement,
    }


def _filters(
    figures: tuple[_Figure, ...], panels: tuple[_Panel, ...]
) -> tuple[tuple[str, str, tuple[str, ...]], ...] | None:
    """The tags by which the figures and panels differ, with their values; None where there are few of them."""
    shown: tuple[_Shown, ...] = (*figures, *panels)
    if len(shown) < _FILTERED:
        return None
    found = []
    for title, (field, name) in _TAGS.items():
        values = tuple(dict.fromkeys(value for each in shown if (value := getattr(each, field))))
        if len(values) > 1:
            found.append((title, name, tuple(sorted(values)) if field == "class_name" else values))
    return tuple(found)


def _terms(document: Document) -> tuple[Term, ...]:
    """The terms that the document uses."""
    seen = Words()
    for sentence in (*document.preface, *document.first.answer):
        seen(sentence.text)
    for section in (*document.sections, *document.folded):
        for text in (*(each.text for each in section.sentences), *(each.caption for each in section.figures)):
            seen(text)
        for table in section.tables:
            seen(" ; ".join((table.caption, *table.columns)))
    known = {**{term.name: term for term in document.terms}, **seen.used}
    return tuple(known[term] for term in sorted(known, key=str.lower))


def _counted(**counts: int) -> str:
    """ "2 figures, 1 table"."""
    return ", ".join(f"{number} {what}{'' if number == 1 else 's'}" for what, number in counts.items() if number)


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}-{number}" for number in count(2))
