"""What `vitlens study` records: the chapters of a whole study, or the points of a --kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from vitlens.commands.run.chapters.record import CHAPTERS
from vitlens.commands.shared.receptive import FieldArrays, FieldRow
from vitlens.commands.shared.trainings import TRAINING, TrainingImages
from vitlens.commands.study.kinds import record as kinds
from vitlens.record import Record, arrays, table
from vitlens.records import TableOf


@dataclass(frozen=True)
class LeftOutRow:
    """A chapter that was left out because it needs labels and there are none."""

    chapter: str


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Record):
    """A study: chapters that are runs of other commands, or points that were trained with several seeds."""

    command: ClassVar[str] = "study"
    # points of a --kind
    design: tuple[kinds.DesignRow, ...] = table()
    points: tuple[kinds.PointRow, ...] = table()
    trials: tuple[kinds.TrialRow, ...] = table()
    comparisons: tuple[kinds.ComparisonRow, ...] = table()
    recipes: tuple[kinds.RecipeRow, ...] = table()
    receptive_fields: tuple[FieldRow, ...] = table()
    position_order: tuple[kinds.PositionRow, ...] = table()
    curves: tuple[kinds.CurveRow, ...] = table()
    reached: tuple[kinds.ReachedRow, ...] = table()
    moved: tuple[kinds.MovedRow, ...] = table()
    heads_moved: tuple[kinds.HeadMovedRow, ...] = table()
    head_shifts: tuple[kinds.ShiftRow, ...] = table()
    layer_similarity: tuple[kinds.SimilarityRow, ...] = table()
    probes: tuple[kinds.ProbeRow, ...] = table()
    maps: tuple[kinds.MapRow, ...] = table()
    correct: kinds.CorrectArrays | None = arrays("correct")
    cut: kinds.CutArrays | None = arrays("cut")
    field_maps: FieldArrays | None = arrays("receptive_fields")
    position_similarity: kinds.OrderArrays | None = arrays("position_similarity")
    map_arrays: kinds.MapArrays | None = arrays("maps")
    training_images: TrainingImages | None = arrays("training_images")


RECORD = StudyRecord

LEFT_OUT = TableOf("left_out", LeftOutRow)
TABLES: Final[tuple[TableOf[Any], ...]] = (CHAPTERS, LEFT_OUT, TRAINING)


def left_out_words(rows: Sequence[LeftOutRow]) -> str:
    """The note on chapters that were left out."""
    return f"Left out, as they need labelled images: {', '.join(row.chapter for row in rows)}."
