"""Verdicts of `vitlens look`, from its record: a few images decide nothing, and the report says what would."""

from collections.abc import Iterator

from vitlens.commands.look.record import LOOK
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Verdict
from vitlens.uncertainty import Estimate


def verdicts(record: Record) -> Iterator[Verdict]:
    """Accuracy and maps are not tested; the share of faulty heads is shown, which single images cannot judge."""
    (alias,) = record.aliases
    (row,) = record.rows(LOOK)
    images = f"{row.images} image{'' if row.images == 1 else 's'}"
    yield rules.not_tested(
        f"accuracy of {alias}", f"{images} without labels; vitlens evaluate {alias} --data DATA judges it"
    )
    yield rules.not_tested(
        f"explanation of {alias}",
        "no patch was removed, so it is not known whether a map shows what the prediction depends on; vitlens explain "
        "--verify tests it",
    )
    if row.labelled:
        share = Estimate(row.faulty / row.labelled, n=row.labelled)
        because = f"dead or uniform heads on {images} alone; vitlens stats {alias} on a data set judges them"
        yield rules.inconclusive(f"attention health of {alias}", share, rules.HEADS, because)
