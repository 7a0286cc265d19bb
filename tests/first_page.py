"""What every report keeps to: few findings and limits, five words for a verdict, short sections, backed sentences."""

from typing import Final, get_args

from tests.backing import unbacked
from vitlens.report.document import Document, State
from vitlens.report.findings import MOST
from vitlens.report.layout import FIGURES, ROWS

LIMITS: Final = 5


def check_first_page(document: Document) -> None:
    """Fail where a report says more than a reader takes in, or what no row backs."""
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
