"""The report of `vitlens attack`, from its record."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import TRANSFER
from vitlens.commands.attack.report.checks import checks
from vitlens.commands.attack.report.classes import by_class
from vitlens.commands.attack.report.corruptions import corruptions
from vitlens.commands.attack.report.distances import distances
from vitlens.commands.attack.report.inside import inside
from vitlens.commands.attack.report.summary import summary
from vitlens.commands.attack.report.transfer import transfer
from vitlens.records import Record
from vitlens.report.document import Document, Sentence, sentences

__all__ = ["report"]

_LIMITS: Final = (
    "A robust accuracy is an upper bound: a stronger attack may bring it lower. None of this is a proof of robustness.",
    "Images are attacked one by one at the size that is stated, in floats between 0 and 1; pixels are not rounded to "
    "256 steps afterwards.",
    "Intervals are over images of this kind: not over other images, and not over other trainings of the models.",
)
_DOWNWARDS: Final = (
    "Attacks within an epsilon were tried at the largest epsilon first, then at smaller ones down to the first at "
    "which an image was still classified correctly; smaller epsilons were not tried for that image and count as "
    'survived. The self-check "from below" tries some of them.'
)
_TRANSFER: Final = (
    "Transfer is from attacks that stop at the first success: it says little of attacks made to transfer."
)


def report(record: Record) -> Document:
    """Summary and verdict, distances, classes, transfer, what changes inside, common corruptions, self-checks."""
    sections = (
        summary(record),
        distances(record),
        *by_class(record),
        *transfer(record),
        *inside(record),
        *corruptions(record),
        checks(record),
    )
    return Document(record.config.title, sections, limits=tuple(_limits(record)))


def _limits(record: Record) -> Iterator[Sentence]:
    yield from sentences(*_LIMITS)
    if record.options(AttackOptions).downwards:
        yield Sentence(_DOWNWARDS)
    if record.rows(TRANSFER):
        yield Sentence(_TRANSFER)
