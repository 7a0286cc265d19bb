"""The loss and the prediction of every image without units, as a bench measures them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.ablation.units import Removal
from vitlens.analysis.evaluation.log_odds import loss_of
from vitlens.names import Replacement
from vitlens.processes import Processes
from vitlens.shapes import Labels

ByImage = Float[Tensor, "sets images"]  # one number for each set of units and each image


@dataclass(frozen=True)
class Outcomes:
    """The loss and the prediction of every image without sets of units.

    Tensors are on the CPU, log-odds in float64. Losses are computed from the log-odds.

    sets: the sets of removed units.
    replace: the replacement of their outputs.
    labels (n,): the true classes, as columns of the logits.
    clean_log_odds (n,): the log-odds of the label in the unchanged model, in nats.
    clean_correct (n,): True if the prediction of the unchanged model is the label.
    log_odds (sets, n): the log-odds of the label without each set, in nats.
    correct (sets, n): True if the prediction without the set is the label.
    forward_equivalents: the cost per image, in full forward passes.
    note: a remark for a report, or "".
    """

    sets: tuple[Removal, ...]
    replace: Replacement
    labels: Labels
    clean_log_odds: Float[Tensor, " images"]
    clean_correct: Bool[Tensor, " images"]
    log_odds: ByImage
    correct: Bool[Tensor, "sets images"]
    forward_equivalents: float
    note: str = ""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    @property
    def units(self) -> Removal:
        """Return the removed units, if each set holds a single unit."""
        return tuple(unit for (unit,) in self.sets)

    @property
    def clean_loss(self) -> Float[Tensor, " images"]:
        """Return the cross-entropy of each image in the unchanged model, nats."""
        return loss_of(self.clean_log_odds)

    @property
    def loss(self) -> ByImage:
        """Return the cross-entropy of each image without each set, nats."""
        return loss_of(self.log_odds)

    @property
    def delta_loss(self) -> ByImage:
        """Return the rise of each image's cross-entropy, nats; it is positive if the units help."""
        return self.loss - self.clean_loss

    @property
    def delta_log_odds(self) -> ByImage:
        """Return the fall of the log-odds of each label, nats; it is positive if the units help."""
        fall = self.clean_log_odds - self.log_odds
        is_equal = self.clean_log_odds == self.log_odds  # both are infinite with a single class
        return torch.where(is_equal, 0.0, fall)

    @property
    def delta_accuracy(self) -> ByImage:
        """Return the accuracy lost on each image, points.

        It is 100 if removal makes the prediction wrong, -100 if it makes it right.
        """
        return 100 * (self.clean_correct.double() - self.correct.double())

    def rows(self, index: list[int]) -> "Outcomes":
        """Return the outcomes of some of the sets."""
        sets = tuple(self.sets[row] for row in index)
        return replace(self, sets=sets, log_odds=self.log_odds[index], correct=self.correct[index])

    @classmethod
    def join(cls, parts: "Sequence[Outcomes]", processes: Processes) -> "Outcomes":
        """Return the outcomes of the same sets on all images of all processes, in their order.

        A collective: all processes call it.
        """
        tensors: dict[str, Any] = {}
        for name in ("labels", "clean_log_odds", "clean_correct", "log_odds", "correct"):
            # images are the last axis, but must be the first to be joined
            values = torch.cat([getattr(part, name).movedim(-1, 0) for part in parts])
            tensors[name] = processes.gathered(values).movedim(0, -1)
        passes = sum(part.forward_equivalents * len(part) for part in parts)
        images = sum(len(part) for part in parts)
        totals = processes.total(torch.tensor([passes, images], dtype=torch.float64))
        total_passes, total_images = totals.tolist()
        return replace(
            parts[0],
            **tensors,
            forward_equivalents=total_passes / total_images,
            note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        )


class Stored(NamedTuple):
    """The outcomes of sets of units on one batch.

    log_odds (sets, n): the log-odds of the label without each set, in nats.
    correct (sets, n): True if the prediction without the set is the label.
    cost: the multiply-adds of linear layers that the measurement took.
    """

    log_odds: ByImage
    correct: Bool[Tensor, "sets images"]
    cost: int


# A function that returns the stored outcomes of sets on one batch. If there are none, it calls its
# second argument to measure them, and stores them. So an interrupted run can be resumed.
# `Bench.memory` makes one for each batch.
Memory: TypeAlias = Callable[[Sequence[Removal], Callable[[], Stored]], Stored]
