"""The rows of `vitlens ablate` on what single heads do: their labels, what a mean hides, which class needs them."""

from dataclasses import dataclass

from vitlens.commands.ablate.record.rows import unit_label
from vitlens.commands.scaffold.head_words import head_words
from vitlens.names import Replacement
from vitlens.records import UntrustedName
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class HeadLabelRow:
    """What one head attends to, as `vitlens stats` labels it. score, low, high: the highest score of a label, with its
    95 % interval over images; best: the label with that score; other, other_score: the highest among labels that
    contradict it; images: on which it was measured."""

    layer: int
    head: int
    label: str
    score: float
    low: float | None
    high: float | None
    best: str
    other: str | None
    other_score: float | None
    images: int

    @property
    def words(self) -> str:
        """What the head does, in a few words."""
        return head_words(self.label, self.best, self.other, self.score)

    @property
    def scores(self) -> str:
        """The score of its label; without a clear one, the best two."""
        if self.label == self.best or self.other is None or self.other_score is None:
            return f"{self.score:.2f}"
        return f"{self.best} {self.score:.2f}, {self.other} {self.other_score:.2f}"


@dataclass(frozen=True)
class ReplacementDifferenceRow:
    """One head replaced by its output on another image, minus the same head replaced by its mean: the rise of the loss
    that the mean hides, nats, paired over images; p_holm: of sign flips, corrected over all heads."""

    unit: str
    first: Replacement
    second: Replacement
    difference: float
    low: float | None
    high: float | None
    p_holm: float | None
    n: int

    @property
    def label(self) -> str:
        """L3.H7."""
        return unit_label(self.unit)

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high, self.n, "nats")


@dataclass(frozen=True)
class BrokenClassRow:
    """The class whose loss rises most without one of the most important heads, among classes of enough images; nats and
    points of accuracy lost. classes: how many were compared."""

    head: str
    class_name: UntrustedName
    images: int
    classes: int
    delta_loss: float
    delta_accuracy: float
