"""What `vitlens study` records: the chapters of a whole study, or the points of a --kind."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from vitlens.commands.run.chapters import Chaptered
from vitlens.commands.shared.receptive import FieldArrays, FieldRow
from vitlens.commands.shared.stages import StageRow, stages
from vitlens.commands.shared.trainings import Budget, TrainingImages
from vitlens.commands.study.kinds import record as kinds
from vitlens.record import arrays, col, table


@dataclass(frozen=True)
class LeftOutRow:
    """A chapter that was left out because it needs labels and there are none."""

    chapter: str = col("chapter")


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Chaptered):
    """A whole study, whose chapters are runs of other commands, or points that were trained with several seeds."""

    command: ClassVar[str] = "study"
    left_out: tuple[LeftOutRow, ...] = table()
    training: tuple[Budget, ...] = table()
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

    @property
    def vits(self) -> tuple[str, ...]:
        """The models whose attention is analysed."""
        return tuple(chapter.row.alias for chapter in self.of("stats"))

    @property
    def studied(self) -> tuple[str, ...]:
        """All models, in the order in which they were given."""
        first = self.of("evaluate") or self.of("profile")
        return first[0].record.aliases if first else self.vits

    @cached_property
    def stages(self) -> tuple[StageRow, ...]:
        """How each ViT works, by stage of its layers."""
        return tuple(row for alias in self.vits for row in self._stages(alias))

    def _stages(self, alias: str) -> tuple[StageRow, ...]:
        stats, ablate, attention = (self.about(word, alias) for word in ("stats", "ablate", "attention"))
        if stats is None:
            return ()
        of = stats.record
        units, lens = ((), ()) if ablate is None else (ablate.record.units, ablate.record.lens)
        on_object = () if attention is None else attention.record.on_object
        return tuple(stages(alias, of.heads, of.layers, units, lens, on_object))


RECORD = StudyRecord
