"""A whole report as one HTML file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from vitlens.files import inside, named_file
from vitlens.record import Record
from vitlens.report.document import Document, FigureSpec, ImagePanel, Section
from vitlens.report.explorer import Explorer
from vitlens.report.glossary import Term, find_terms
from vitlens.report.html import pictures
from vitlens.report.html.fragment import explorer_part
from vitlens.report.html.packing import BUDGET
from vitlens.report.html.templates import POLICY, asset, explorer_script, rendered
from vitlens.report.html.text import Words, command_without_paths, plain
from vitlens.report.markdown import UNFINISHED, citation, provenance, repeated_words, took
from vitlens.report.numbers import in_words
from vitlens.version import __version__

_OPEN: Final = 40  # a table with more rows is closed at first
_FILTERED: Final = 4  # a section with at least so many figures and panels has a filter
_SIZE: Final = 11_500_000  # bytes of the pictures, weights, queries and keys of a page
_LEAST: Final = 3_000_000  # bytes for the explorer's weights, however many pictures there are
_PANEL: Final = 160  # px of the longer side of a panel's pictures
# the fields of `Tags` by their title on the page
_TAGS: Final = {"Outcome": "outcome", "Class": "class_name", "Agreement": "agreement"}
Part = dict[str, Any]  # the values of a figure, a panel or a section for the template


class _PageParts:
    """Turns the sections and figures of one document into values for the template.

    folder: the folder of the run, which holds the figures.
    numbers: the numbers of figures by name.
    words: turns text into HTML and explains terms.
    """

    def __init__(self, document: Document, folder: Path) -> None:
        self.folder = folder
        self.numbers = {
            figure.name: number for number, figure in enumerate(document.figures, start=1)
        }
        self.words = Words()
        self._anchors: set[str] = set()

    def section(self, section: Section) -> Part:
        """Return a section with its figures as pictures.

        Its `filters` are a list of `_Filter`.
        """
        figures = list(map(self.figure, section.figures))
        panels = list(map(_panel, section.panels))
        has_filters = len(figures) + len(panels) >= _FILTERED
        return {
            **vars(section),
            "anchor": self._anchor(section.title),
            "title": plain(section.title),
            "figures": figures,
            "panels": panels,
            "filters": _filters(panels) if has_filters else [],
            "more": quote(section.more),
        }

    def figure(self, figure: FigureSpec) -> Part:
        """Return a figure, with the picture that was drawn into the folder."""
        path = inside(self.folder, "figures", named_file(figure.name, ".png"))
        return {
            **vars(figure),
            "text": f"{figure.name.replace('_', ' ')} {plain(figure.caption)}",
            "number": self.numbers[figure.name],
            "picture": pictures.figure(path) if path.is_file() else None,
            "alt": plain(figure.alt or figure.caption),
        }

    def _anchor(self, title: str) -> str:
        """Return a new anchor for a title, such as "s-how-sharp" or "s-how-sharp-2"."""
        stem = re.sub(r"[^a-z0-9]+", "-", plain(title).lower())[:60].strip("-") or "part"
        anchor = f"s-{stem}"
        number = 1
        while anchor in self._anchors:
            number += 1
            anchor = f"s-{stem}-{number}"
        self._anchors.add(anchor)
        return anchor


def page(document: Document, record: Record) -> str:
    """Return the whole file: first page, attention explorer, sections, folded parts and glossary.

    The file has no absolute path of this machine, and it fetches nothing (POLICY).

    record: the record of the run. Its settings and models are listed. Its folder must already hold
        the figures.
    """
    parts = _PageParts(document, record.folder)
    first = document.first
    sections = tuple(map(parts.section, document.sections))
    explorer = None
    if document.explorer is not None:
        explorer = _explorer_that_fits(sections, document.explorer)
    values = {
        "title": plain(document.title),
        "document": document,
        "record": record,
        "version": __version__,
        "policy": POLICY,
        "style": asset("style.css"),
        "page_script": asset("page.js"),
        "explorer_script": explorer_script(),
        "words": parts.words,
        "in_words": in_words,
        "plain": plain,
        "most_rows": _OPEN,
        "unfinished": UNFINISHED.get(record.status, ""),
        "answer": tuple((sentence, parts.numbers.get(sentence.place)) for sentence in first.answer),
        "picture": None if first.picture is None else parts.figure(first.picture),
        "folded": tuple(map(parts.section, document.folded)),
        "explorer": explorer,
        "sections": sections,
        "terms": _terms(document),
        "command_line": command_without_paths(record.config.command_line),
        "took": took(record),
        "repeated": plain(repeated_words(record)),
        "models": tuple(map(provenance, record.config.models)),
        "citation": plain(citation(record)),
    }
    return rendered("page.html.jinja", **values, contents=tuple(_contents(values, sections)))


def _explorer_that_fits(sections: Sequence[Part], explorer: Explorer) -> Part:
    """Return an explorer in the bytes that the pictures of the sections leave of a page.

    The picture of the first page and those of folded parts are not counted.
    """
    size_of_pictures = 0
    for section in sections:
        for picture in _pictures_of(section):
            size_of_pictures += len(picture.uri)
    bytes_left = max(0, _SIZE - size_of_pictures)
    bytes_for_weights = max(_LEAST, min(BUDGET, bytes_left))
    bytes_for_vectors = max(0, bytes_left - bytes_for_weights)  # of queries and keys
    return explorer_part(explorer, budget=bytes_for_weights, spare=bytes_for_vectors)


def _pictures_of(section: Part) -> Iterator[pictures.Embedded]:
    """Yield the pictures of the panels and figures of a section."""
    for panel in section["panels"]:
        for picture, _caption in panel["pictures"]:
            yield picture
    for figure in section["figures"]:
        if figure["picture"] is not None:  # its file exists
            yield figure["picture"]


def portfolio_page(document: Document, record: Record) -> str:
    """Return a report without a first page as one file that prints well.

    It fetches nothing (POLICY). The folder of the record must already hold the figures.
    """
    parts = _PageParts(document, record.folder)
    return rendered(
        "portfolio.html.jinja",
        title=plain(document.title),
        record=record,
        version=__version__,
        policy=POLICY,
        style=asset("style.css"),
        words=parts.words,
        in_words=in_words,
        plain=plain,
        preface=document.preface,
        sections=tuple(map(parts.section, document.sections)),
    )


def _contents(values: Mapping[str, object], sections: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """Yield the anchor and the heading of each part of the page."""
    if values["explorer"]:
        yield "explorer", "Attention explorer"
    for section in sections:
        yield section["anchor"], section["title"]
    if values["terms"]:
        yield "glossary", "Glossary"
    yield "repeat-it", "Repeat it"


def _panel(panel: ImagePanel) -> Part:
    captions = [plain(caption) for caption in panel.captions]
    photographs = [pictures.photograph(pixels, most=_PANEL) for pixels in panel.pictures()]
    title = plain(panel.title)
    tags = {name: plain(getattr(panel.tags, name)) for name in _TAGS.values()}
    return {
        **tags,
        "text": " ".join((title, *captions, *tags.values())),
        "title": title,
        "pictures": tuple(zip(photographs, captions, strict=True)),
    }


class _Filter(NamedTuple):
    """A choice of panels by one of their tags.

    title: the title of the tag on the page.
    tag: the field of `Tags`.
    values: the values that panels have.
    """

    title: str
    tag: str
    values: list[str]


def _filters(panels: Sequence[Part]) -> list[_Filter]:
    """Return a filter for each tag that differs between panels."""
    filters = []
    for title, name in _TAGS.items():
        values = list(dict.fromkeys(panel[name] for panel in panels if panel[name]))
        if name == "class_name":
            values.sort()
        if len(values) > 1:
            filters.append(_Filter(title, name, values))
    return filters


def _terms(document: Document) -> tuple[Term, ...]:
    """Return the terms that the document uses, by name."""
    terms = {term.name: term for term in document.terms}
    for text in _texts(document):
        for _, _, term in find_terms(text):
            terms[term.name] = term
    return tuple(sorted(terms.values(), key=lambda term: term.name.lower()))


def _texts(document: Document) -> Iterator[str]:
    """Yield the sentences, captions and titles of columns of a document."""
    for sentence in (*document.preface, *document.first.answer):
        yield sentence.text
    for section in (*document.sections, *document.folded):
        for sentence in section.sentences:
            yield sentence.text
        for figure in section.figures:
            yield figure.caption
        for table in section.tables:
            yield table.caption
            yield from table.columns
