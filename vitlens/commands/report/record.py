"""Two runs of one command, compared: the rows of `vitlens report --compare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

from vitlens.record import Better, Record, col, table
from vitlens.report.claims import SMALLEST
from vitlens.uncertainty import LEVEL, Estimate

ACCURACY: Final = "accuracy"  # the first word of the metric
_QUARTERS: Final = "quarter_accuracy"
SameImages: TypeAlias = Literal["the same", "others", "not known", ""]
Family: TypeAlias = Literal["accuracy", "judged", "described"]
_FAMILIES: Final[tuple[Family, ...]] = ("accuracy", "judged", "described")  # in order of importance


@dataclass(frozen=True)
class MetricChange:
    """One metric before and after.

    metric: its name in the later run.
    words: the metric in words.
    difference: after minus before.
    p: the p-value of the difference, None without intervals.
    p_holm: the p-value, corrected for the metrics of its family.
    test: "paired" for predictions on the same images (McNemar's exact test) and for the attention
        of one head on them (Student's paired t test). Otherwise "independent", which on the same
        images misses small changes; "" without a test.
    better: the direction that is better, None if neither is.
    """

    metric: str = col("metric", unit="text")
    words: str = col("measure", unit="text")
    before: Estimate = col("before")
    after: Estimate = col("after")
    difference: Estimate = col("difference")
    p: float | None = col("p", unit="p")
    p_holm: float | None = col("p (Holm)", unit="p", default=None)
    test: Literal["paired", "independent", ""] = col("test", default="")
    better: Better | None = col("better", default=None)

    @property
    def is_accuracy(self) -> bool:
        """Return True if it is a model's accuracy on all images."""
        return self.metric.partition("/")[0] == ACCURACY

    @property
    def is_of_part(self) -> bool:
        """Return True if it is of a part of the images, whose accuracy follows that of all."""
        return self.metric.partition("/")[0] == _QUARTERS

    @property
    def family(self) -> Family:
        """Return the family of tests: accuracies, metrics with a better direction, and others."""
        if self.is_accuracy:
            return "accuracy"
        return "described" if self.better is None else "judged"

    @property
    def changed(self) -> bool:
        """Return True if the metric changed significantly."""
        return self.p_holm is not None and self.p_holm <= LEVEL

    @property
    def direction(self) -> Literal["better", "worse", ""]:
        """Return the direction of a significant change.

        Returns "" without such a change, and if neither direction is better.
        """
        if not self.changed or self.better is None or not self.difference.value:
            return ""
        change = "higher" if self.difference.value > 0 else "lower"
        return "better" if change == self.better else "worse"


@dataclass(frozen=True)
class JudgedRow:
    """One verdict of both reports."""

    judged: str = col("judged", unit="text")
    before: str = col("before")
    after: str = col("after")


@dataclass(frozen=True)
class SettingRow:
    """One setting that differs."""

    setting: str = col("setting", unit="text")
    before: str = col("before", unit="text")
    after: str = col("after", unit="text")


@dataclass(frozen=True, kw_only=True)
class ComparedRuns(Record):
    """Two runs of one command.

    Its tables are written into comparison/ of the later run, which has tables/ of its own.

    earlier, later: the names of their folders.
    same_images: whether both saw the same images, "" if they take none.
    changes: the metrics of both runs.
    judged: the verdicts of both runs.
    settings: the settings that differ.
    alone: the metrics of only one run.
    judged_alone: the verdicts of only one run.
    failures: the requirements that the later run does not meet, and its other failed verdicts.
    """

    tables_folder: ClassVar[str] = "comparison"

    earlier: str = ""
    later: str = ""
    same_images: SameImages = ""
    changes: tuple[MetricChange, ...] = table()
    judged: tuple[JudgedRow, ...] = table()
    settings: tuple[SettingRow, ...] = table()
    alone: tuple[str, ...] = ()
    judged_alone: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def tables(self) -> Mapping[str, tuple[Any, ...]]:
        """Return the rows of every table by its name, also those of `changed`."""
        return {**super().tables, "changed": tuple(self.changed)}

    @property
    def tested(self) -> Sequence[MetricChange]:
        """Return the metrics with an interval in both runs."""
        return [row for row in self.changes if row.p is not None]

    @property
    def changed(self) -> Sequence[MetricChange]:
        """Return the metrics that changed significantly, by family, the smallest p first.

        Metrics of parts of the images come last.
        """
        rows = [row for row in self.changes if row.changed]
        return sorted(
            rows,
            key=lambda row: (row.is_of_part, _FAMILIES.index(row.family), row.p_holm or 0),
        )

    @property
    def accuracies(self) -> Sequence[MetricChange]:
        """Return the accuracies that differ, the largest fall first."""
        rows = [row for row in self.changes if row.is_accuracy and row.difference.value]
        return sorted(rows, key=lambda row: row.difference.value)

    @property
    def accuracy_images(self) -> int:
        """Return the number of images of the first accuracy, 0 without one."""
        for row in self.changes:
            if row.is_accuracy:
                return row.after.n or 0
        return 0

    @property
    def fell(self) -> Sequence[MetricChange]:
        """Return the accuracies that fell significantly, or by at least SMALLEST points."""
        return [
            row
            for row in self.accuracies
            if row.direction == "worse" or row.difference.value <= -SMALLEST
        ]

    @property
    def worse(self) -> Sequence[MetricChange]:
        """Return the metrics that got significantly worse."""
        return [row for row in self.changed if row.direction == "worse"]
