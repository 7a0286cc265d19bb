"""The report of `vitlens study`: of a whole study, of one controlled comparison, or of a transfer."""

from vitlens.commands.study.record import DESIGN
from vitlens.commands.study.report.points import points_report
from vitlens.commands.study.report.transfer import transfer_report
from vitlens.commands.study.report.whole import whole_report
from vitlens.commands.study.transfer.record import TRANSFER
from vitlens.records import Record
from vitlens.report.document import Document

__all__ = ["report"]


def report(record: Record) -> Document:
    """The report of a whole study, or of one --kind."""
    if record.rows(TRANSFER):
        return transfer_report(record)
    return points_report(record) if record.rows(DESIGN) else whole_report(record)
