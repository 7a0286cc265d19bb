"""The first page of a report in lines for the terminal: verdicts and findings."""

from collections.abc import Iterator

from vitlens.report.document import Document, Finding, FirstPage, Verdict
from vitlens.report.numbers import in_words

_SHOWN = 3  # findings or answers; the report has all
_NUMBERS = 6  # rows of the table


def summary_lines(document: Document) -> Iterator[str]:
    """The title, answers and table of the first page; without one the verdicts and the findings of the highest rank."""
    if document.first is not None:
        yield from _first(document.title, document.first)
        return
    width = max((len(verdict.subject) for verdict in document.verdicts), default=0)
    yield from (_verdict(verdict, width) for verdict in document.verdicts)
    yield from (f"{index}. {_finding(each)}" for index, each in enumerate(document.findings[:_SHOWN], start=1))


def _first(title: str, first: FirstPage) -> Iterator[str]:
    yield title
    yield from (f"  {_plain(each.text)}" for each in first.answer[:_SHOWN])
    if first.glance is not None:
        rows = [tuple(map(in_words, row)) for row in first.glance.rows[:_NUMBERS]]
        wide = max(len(row[0]) for row in rows)
        yield from (f"  {row[0]:<{wide}}  {'  '.join(cell for cell in row[1:] if cell != '–')}" for row in rows)


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")


def _verdict(verdict: Verdict, width: int) -> str:
    value = "" if verdict.value is None else f" {in_words(verdict.value)};"
    return f"{verdict.subject:<{width}}  {verdict.state}:{value} {verdict.because} ({verdict.threshold})"


def _finding(each: Finding) -> str:
    return f"{_plain(each.claim.text)} [{in_words(each.effect)}]"
