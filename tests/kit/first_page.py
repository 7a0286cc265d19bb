"""The rules of every report: a short first page, sections and captions, and claims that agree."""

from typing import Any, Final
from xml.etree import ElementTree

from tests.kit.contradictions import contradictions
from tests.kit.select import values_of
from vitlens.report.claims import Claim, first_page_claims
from vitlens.report.document import Document, FirstPage
from vitlens.report.findings import largest, not_doubted
from vitlens.report.junit import junit
from vitlens.report.sections import Report

SENTENCES: Final = 5
TABLE: Final = 8  # rows


def judged(document: Document) -> list[Claim]:
    """Return its judgements."""
    return [claim for claim in document.claims if claim.state]


def states(document: Document) -> dict[str, str]:
    """Return the state of every judgement, by "calibration of vit-digits"."""
    return {f"{claim.question} of {claim.subject}": claim.state for claim in judged(document)}


def clear_effects(document: Document) -> list[Claim]:
    """Return the clear effects of all that was measured, the clearest first."""
    return [claim for claim in first_page_claims(document.claims, 7) if claim.rank]


def findings_of(report: Report, record: Any) -> tuple[Claim, ...]:
    """Return a report's largest effects that survive correction and rest on sound measurements."""
    return largest(not_doubted(report.effects(record), report(record).claims))


def check_first_page(document: Document) -> None:
    """Fail if a report says more than a reader takes in, or contradicts itself."""
    first = document.first
    assert len(first.answer) <= SENTENCES
    assert len(first.unknown) <= SENTENCES
    assert first.glance is None or len(first.glance.rows) <= TABLE
    words = sum(len(sentence.text.split()) for sentence in (*first.answer, *first.unknown))
    assert words <= 300, words
    assert not list(contradictions(document.claims))
    for claim in document.claims:
        assert not claim.state or claim.because or claim.says, claim.question
    for section in document.sections:
        assert section.title.endswith("?"), section.title
        assert len(section.sentences) <= 3, section.title
        assert len(section.figures) <= 3, section.title
        for table in section.tables:
            assert len(table.rows) <= TABLE, section.title
            assert len(table.columns) <= 6, section.title
    for figure in document.figures:
        assert len(figure.caption.split()) <= 32, figure.caption
    names = values_of(document.figures, "name")
    assert len(names) == len(set(names))


def suite_of(claims: tuple[Claim, ...], *outcomes: Any) -> ElementTree.Element:
    """Return the JUnit suite of a report with these claims, and that of its requirements.

    The audit took 1.5 s.
    """
    document = Document("t", (), FirstPage(()), claims=claims)
    root = ElementTree.fromstring(junit(document, outcomes, suite="vitlens audit", seconds=1.5))
    assert root.tag == "testsuites"
    (suite,) = root
    return suite
