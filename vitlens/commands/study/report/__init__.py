"""The report of `vitlens study`: of a whole study, or of one controlled comparison."""

from vitlens.commands.study.record import DESIGN
from vitlens.commands.study.report.points import points_report
from vitlens.commands.study.report.whole import whole_report
from vitlens.records import Record
from vitlens.report.document import Document

__all__ = ["report"]


def report(record: Record) -> Document:
    """The report of a whole study, or of one --kind."""
    return points_report(record) if record.rows(DESIGN) else whole_report(record)
