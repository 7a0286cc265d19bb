"""The report of `vitlens study`: of a whole study, or of the points of a --kind."""

from typing import Final

from vitlens.commands.study.kinds.report import REPORT as KINDS
from vitlens.commands.study.record import StudyRecord
from vitlens.report.document import Document

REPORTS: Final = (KINDS,)  # all that it may be


def report(record: StudyRecord) -> Document:
    """The report of a whole study, or of one --kind."""
    if record.design:
        return KINDS(record)
    from vitlens.commands.study.report.whole import whole_report

    return whole_report(record)  # type: ignore[arg-type]


REPORT = report
