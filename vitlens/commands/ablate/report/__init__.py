"""The report of `vitlens ablate`, from its record."""

from typing import Final

from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.report.inside import inside, pruned
from vitlens.commands.ablate.report.removal import pairs, removal
from vitlens.commands.ablate.report.summary import summary
from vitlens.commands.ablate.report.top import top_heads
from vitlens.commands.ablate.report.units import every_unit
from vitlens.records import Record
from vitlens.report.document import Document, sentences

_LIMITS: Final = (
    "The importance of a unit is the effect of removing it alone: each of two heads with the same function can look "
    "unimportant. Pairs and curves show some of that, not all.",
    "What matters on these images need not matter on others; intervals are over images of this kind.",
)


def report(record: Record) -> Document:
    """What matters, how certain it is, what can be removed, pairs of heads, patching and contributions, pruning."""
    if record.options(AblateOptions).top is not None:
        return Document(record.config.title, (top_heads(record),), limits=sentences(*_LIMITS))
    sections = (
        summary(record),
        every_unit(record),
        *removal(record),
        *pairs(record),
        *inside(record),
        *pruned(record),
    )
    return Document(record.config.title, sections, limits=sentences(*_LIMITS))
