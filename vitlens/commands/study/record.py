"""The records of `vitlens study`: of a whole study, whose chapters are other commands, or of one
--kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vitlens.commands.run.chapters import Chaptered
from vitlens.commands.shared.trainings import Budget
from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.commands.study.kinds.pretraining.record import PretrainingRecord
from vitlens.commands.study.kinds.transfer.record import TransferRecord
from vitlens.commands.study.kinds.variants.record import VariantsRecord
from vitlens.record import Record, col, table


@dataclass(frozen=True)
class LeftOutRow:
    """A chapter that was left out because it needs labels and there are none."""

    chapter: str = col("chapter")


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Chaptered):
    """A whole study, whose chapters are runs of other commands."""

    left_out: tuple[LeftOutRow, ...] = table()
    training: tuple[Budget, ...] = table()

    @property
    def vits(self) -> tuple[str, ...]:
        """Return the models whose attention is analysed."""
        return tuple(chapter.row.alias for chapter in self.of("stats"))

    @property
    def studied(self) -> tuple[str, ...]:
        """Return all models, in the order in which they were given."""
        # both chapters are about all models; without labels there is no evaluate, and in a study
        # that was stopped there may be neither
        chapters = self.of("evaluate") or self.of("profile")
        return chapters[0].record.aliases if chapters else self.vits


RECORDS: Final[tuple[type[Record], ...]] = (
    StudyRecord,
    VariantsRecord,
    TransferRecord,
    PretrainingRecord,
)
# the kinds with a record of their own; all others have that of small models
_RECORD_OF_KIND: Final[Mapping[str, type[Record]]] = {
    "transfer": TransferRecord,
    "pretraining": PretrainingRecord,
}


def record_class(options: Mapping[str, Any]) -> type[Record]:
    """Return the class of the record of a study with these options."""
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return StudyRecord
    return _RECORD_OF_KIND.get(kind, VariantsRecord)
