"""What every report keeps to: few findings and limits, five words for a verdict, short sections, backed sentences."""

from typing import Final, get_args

from tests.backing import unbacked
from vitlens.report.claims import contradictions
from vitlens.report.document import Document, State
from vitlens.report.claims import MOST
from vitlens.report.layout import FIGURES, ROWS

LIMITS: Final = 5
TABLE: Final = 8  # rows


def check_first_page(document: Document) -> None:
    """Fail where a report says more than a reader takes in, or what no row backs."""
    if document.first is not None:
        check_sections(document)
        return
    assert len(document.limits) <= LIMITS, [each.text for each in document.limits]
    assert len(document.findings) <= MOST
    assert list(document.findings) == sorted(document.findings, key=lambda each: -each.rank)
    for finding in document.findings:
        assert None not in (finding.effect.low, finding.effect.high), finding.claim.text
        assert not finding.figure or finding.figure in {figure.name for figure in document.figures}, finding.claim.text
    for verdict in document.verdicts:
        assert verdict.state in get_args(State)
        assert verdict.threshold
        assert verdict.because
    for section in document.sections:
        assert len(section.figures) <= FIGURES, section.title
        assert len(section.tables) <= 1, section.title
        assert all(len(table.rows) <= ROWS for table in section.tables), section.title
    faults = list(unbacked(document))
    assert not faults, faults


def check_sections(document: Document) -> None:
    """The same for a report of sections: a first page that is read in a minute, short captions, claims that agree."""
    first = document.first
    assert first is not None
    assert len(first.answer) <= LIMITS
    assert len(first.unknown) <= LIMITS
    assert first.glance is None or len(first.glance.rows) <= TABLE
    words = sum(len(each.text.split()) for each in (*first.answer, *first.unknown))
    assert words <= 300, words
    assert not list(contradictions(document.claims))
    for section in document.sections:
        assert section.title.endswith("?"), section.title
        assert len(section.sentences) <= 3, section.title
        assert len(section.figures) <= 3, section.title
        for table in section.tables:
            assert len(table.rows) <= TABLE, section.title
            assert len(table.columns) <= 6, section.title
    for figure in document.figures:
        assert len(figure.caption.split()) <= 32, figure.caption
    names = [figure.name for figure in document.figures]
    assert len(names) == len(set(names))
