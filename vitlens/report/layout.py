"""The layout of a report: results first, methods gathered after them, and whatever is long in the appendix."""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from vitlens.report.document import Document, Finding, Section, Table

FIGURES: Final = 2  # of a section in the body
ROWS: Final = 12  # of its table
METHODS: Final = "Methods"


def laid_out(document: Document) -> Document:
    """The same document with at most FIGURES figures and one table of at most ROWS rows in each section of the body.

    What a section shows beyond that goes to the appendix under the section's title, a longer table in full. Sentences
    that define or explain are gathered in one section behind the results, each once.
    """
    methods = dict.fromkeys(
        each for section in document.sections for each in section.sentences if each.says == "method"
    )
    body = tuple(_body(section) for section in document.sections)
    gathered = (Section(METHODS, tuple(methods)),) if methods else ()
    more = tuple(section for section in map(_more, document.sections) if section.figures or section.tables)
    return replace(
        document,
        sections=(*(section for section in body if not _is_empty(section)), *gathered),
        appendix=(*more, *document.appendix),
        findings=tuple(
            _on_first_sheet(each, {figure.name for figure in document.figures}) for each in document.findings
        ),
    )


def _on_first_sheet(finding: Finding, figures: Collection[str]) -> Finding:
    """A finding on a figure that is drawn on several sheets names the first of them."""
    sheet = f"{finding.figure}_1"
    return replace(finding, figure=sheet) if finding.figure not in figures and sheet in figures else finding


def _body(section: Section) -> Section:
    return replace(
        section,
        sentences=tuple(each for each in section.sentences if each.says != "method"),
        figures=section.figures[:FIGURES],
        tables=tuple(_shortened(table) for table in section.tables[:1]),
    )


def _shortened(table: Table) -> Table:
    if len(table.rows) <= ROWS:
        return table
    caption = f"{table.caption} (the first {ROWS} of {len(table.rows):,} rows; all of them are in the appendix)"
    return replace(table, caption=caption, rows=table.rows[:ROWS])


def _more(section: Section) -> Section:
    """What the body leaves out of a section."""
    long = tuple(table for table in section.tables[:1] if len(table.rows) > ROWS)
    return replace(
        section, sentences=(), figures=section.figures[FIGURES:], tables=(*long, *section.tables[1:]), panels=()
    )


def _is_empty(section: Section) -> bool:
    return not (section.sentences or section.figures or section.tables or section.panels)
