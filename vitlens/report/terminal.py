"""The first page of a report in lines for the terminal: its title, answers and table."""

from collections.abc import Iterator

from vitlens.report.document import Document
from vitlens.report.numbers import in_words

_SHOWN = 3  # answers; the report has all
_NUMBERS = 6  # rows of the table


def summary_lines(document: Document) -> Iterator[str]:
    """The title, and the answers and the table of the first page."""
    first = document.first
    yield document.title
    yield from (f"  {_plain(each.text)}" for each in first.answer[:_SHOWN])
    if first.glance is not None and first.glance.rows:
        rows = [tuple(map(in_words, row)) for row in first.glance.rows[:_NUMBERS]]
        wide = max(len(row[0]) for row in rows)
        yield from (f"  {row[0]:<{wide}}  {'  '.join(cell for cell in row[1:] if cell != '–')}" for row in rows)


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")
