"""The record of `vitlens audit`: chapters, how the attack was chosen, and what was not tested.

A chapter is the report of one command inside the audit. Its part is its name here, of which the
command `attack` has two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from vitlens.commands.run.chapters import Chapter, Chaptered
from vitlens.commands.shared.failures_record import FailuresRecord
from vitlens.commands.shared.reliance import RelianceRecord
from vitlens.record import col, table
from vitlens.uncertainty import Estimate

Part: TypeAlias = Literal[
    "evaluate", "explain", "attack", "corruptions", "stats", "failures", "reliance"
]
CandidateState: TypeAlias = Literal["chosen", "weaker", "too long", "undefined"]
# the attack command has two chapters; this one has the corruptions, and FGSM on all images
CORRUPTIONS_PART: Final = "corruptions"
REPORT_SHARE: Final = 0.1  # of the budget, kept for the report

_PART_WORDS: Final[Mapping[str, str]] = {  # of the chapters, by name
    "evaluate": "accuracy and calibration",
    "explain": "maps",
    "attack": "the attack",
    CORRUPTIONS_PART: "corruptions",
    "stats": "attention",
}


@dataclass(frozen=True)
class CandidateRow:
    """One way to attack the model, the strongest first.

    attacks: names of the registry.
    images: number of attacked images.
    minutes: upper bound of its time here, None if an attack is not defined for the model.
    state: chosen, weaker than the chosen one, longer than what is left of the budget, or not
        defined for so few classes.
    """

    attacks: tuple[str, ...] = col("attacks")
    restarts: int = col("restarts")
    epsilons: tuple[float, ...] = col("epsilon, 1/255")
    images: int = col("images")
    minutes: float | None = col("minutes, at most")
    state: CandidateState = col("state")


@dataclass(frozen=True)
class BudgetRow:
    """Minutes of the budget and how they were spent.

    minutes: the minutes of --budget.
    others: taken by all chapters before the attack.
    left: for the attack.
    total: of the whole audit before its report was written.
    pass_seconds: the time of one forward pass of one image.
    """

    minutes: float = col("budget, minutes")
    others: float = col("before the attack, minutes")
    left: float = col("left for the attack, minutes")
    pass_seconds: float = col("one forward pass", unit="s")
    total: float | None = col("all, minutes", default=None)


@dataclass(frozen=True)
class UntestedRow:
    """A chapter that was not run, or not whole, and why."""

    part: Part = col("chapter")
    reason: str = col("reason", unit="text")


@dataclass(frozen=True, kw_only=True)
class AuditRecord(Chaptered, FailuresRecord, RelianceRecord):
    """One model, judged."""

    commands: ClassVar = ("evaluate", "stats", "explain", "attack")

    attacks_considered: tuple[CandidateRow, ...] = table()
    budget: tuple[BudgetRow, ...] = table()
    untested: tuple[UntestedRow, ...] = table()

    @property
    def chapters_by_name(self) -> Mapping[str, Chapter]:
        """Return the chapters that were run, by name.

        The name is the command, or the chapter's part if the command has several chapters.
        """
        return {chapter.row.part or chapter.row.word: chapter for chapter in self.parts}

    @property
    def images_of_parts(self) -> Mapping[str, int]:
        """Return the number of images of each part of the audit."""
        counts = {}
        for name, chapter in self.chapters_by_name.items():
            counts[_PART_WORDS.get(name, name)] = chapter.record.images
        if self.reliance:
            counts["cues"] = max(row.n for row in self.reliance)
        return counts

    @property
    def uses_predictions_as_labels(self) -> bool:
        """Return True if the model's predictions were used as labels."""
        return "evaluate" not in self.chapters_by_name

    def metrics_of(self, chapter: Chapter) -> Mapping[str, Estimate]:
        """Return the metrics of a chapter; the strongest attack is that of the verdict."""
        metrics = super().metrics_of(chapter)
        if chapter.row.part != CORRUPTIONS_PART or "attack" not in self.chapters_by_name:
            return metrics
        strongest = {row.strongest_metric for row in chapter.record.overall}
        return {name: value for name, value in metrics.items() if name not in strongest}

    @property
    def chosen_attack(self) -> CandidateRow | None:
        """Return the attack that was run."""
        return next((row for row in self.attacks_considered if row.state == "chosen"), None)
