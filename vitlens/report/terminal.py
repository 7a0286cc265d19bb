"""The first page of a report in lines for the terminal: verdicts and findings."""

from collections.abc import Iterator

from vitlens.report.document import Document, Finding, Verdict
from vitlens.report.numbers import in_words

_SHOWN = 3  # findings; the report has all


def summary_lines(document: Document) -> Iterator[str]:
    """The verdicts, and the findings of the highest rank."""
    width = max((len(verdict.subject) for verdict in document.verdicts), default=0)
    yield from (_verdict(verdict, width) for verdict in document.verdicts)
    yield from (f"{index}. {_finding(each)}" for index, each in enumerate(document.findings[:_SHOWN], start=1))


def _verdict(verdict: Verdict, width: int) -> str:
    value = "" if verdict.value is None else f" {in_words(verdict.value)};"
    return f"{verdict.subject:<{width}}  {verdict.state}:{value} {verdict.because} ({verdict.threshold})"


def _finding(each: Finding) -> str:
    return f"{each.claim.text.replace('**', '').replace('`', '')} [{in_words(each.effect)}]"
