"""Units of a model that can be removed, and the loss and prediction of every image without them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.errors import InputError
from vitlens.lens.interventions import BlockRemoved, HeadReplaced, Intervention, MLPReplaced
from vitlens.names import Replacement, UnitKind
from vitlens.processes import Processes
from vitlens.shapes import Labels

ANOTHER = "another image"  # the source of a resampled unit's tensor, in the words of a report

PerUnit = Float[Tensor, " units"]
UnitsByImage = Float[Tensor, "units batch"]


@dataclass(frozen=True)
class Unit:
    """A head, an MLP or a whole block. layer, head: from 0; head: None unless it is one."""

    kind: UnitKind
    layer: int
    head: int | None = None

    def __post_init__(self) -> None:
        if (self.head is None) == (self.kind == "head"):
            raise InputError(f"expected a number for a head and none for others, found {self.kind} {self.head}")

    @property
    def name(self) -> str:
        """Its name in metrics: "head/3/7", "mlp/3", "block/3"; from 0."""
        return "/".join(str(part) for part in (self.kind, self.layer, self.head) if part is not None)

    def intervention(self, by: Replacement) -> Intervention:
        """The intervention that removes it. A block is skipped with any replacement.

        A resampled unit's output is replaced by its output for another image in the unchanged model.
        """
        if self.kind == "block":
            return BlockRemoved(self.layer)
        source = ANOTHER if by == "resample" else ""
        if self.head is None:
            return MLPReplaced(self.layer, "given" if by == "resample" else by, source)
        return HeadReplaced(self.layer, self.head, "given" if by == "resample" else by, source)


Removed = TypeVar("Removed", Unit, tuple[Unit, ...])


@dataclass(frozen=True)
class Outcomes(Generic[Removed]):
    """Every image's loss and prediction without units: one at a time (Effects), or several at once (JointEffects).

    units: what was removed; replace: what replaced its output; labels (n,): the true classes, as columns of the logits;
    clean_loss (n,): cross-entropy of the unchanged model, nats; clean_correct (n,): whether its prediction is the
    label; loss, correct (units, n): the same without each; forward_equivalents: full forward passes spent an image, a
    mean; note: a remark for a report, or "". All on the CPU, losses in float64.
    """

    units: tuple[Removed, ...]
    replace: Replacement
    labels: Labels
    clean_loss: Float[Tensor, " batch"]
    clean_correct: Bool[Tensor, " batch"]
    loss: UnitsByImage
    correct: Bool[Tensor, "units batch"]
    forward_equivalents: float
    note: str = ""

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    @property
    def delta_loss(self) -> UnitsByImage:
        """Change of each image's cross-entropy, nats; positive: the unit helps."""
        return self.loss - self.clean_loss

    @property
    def delta_accuracy(self) -> UnitsByImage:
        """Accuracy lost on each image, points: 100 where removal makes the prediction wrong, -100 where right."""
        return 100 * (self.clean_correct.double() - self.correct.double())

    @classmethod
    def join(cls, parts: "Sequence[Outcomes[Removed]]") -> "Outcomes[Removed]":
        """The outcomes of several batches, in their order. Raises InputError unless they are of the same units."""
        if not parts:
            raise InputError("expected effects on at least one batch, found none")
        first = parts[0]
        if any((part.units, part.replace) != (first.units, first.replace) for part in parts):
            raise InputError("expected effects of the same units and replacement in all parts, found others")
        images = sum(len(part) for part in parts)
        return replace(
            first,
            labels=torch.cat([part.labels for part in parts]),
            clean_loss=torch.cat([part.clean_loss for part in parts]),
            clean_correct=torch.cat([part.clean_correct for part in parts]),
            loss=torch.cat([part.loss for part in parts], dim=1),
            correct=torch.cat([part.correct for part in parts], dim=1),
            forward_equivalents=sum(part.forward_equivalents * len(part) for part in parts) / images,
            note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        )

    def gathered(self, processes: Processes) -> "Outcomes[Removed]":
        """The outcomes of all processes' shares of the images, in the order of the images; called by every process."""
        spent = processes.total(torch.tensor([self.forward_equivalents * len(self), len(self)]))
        return replace(
            self,
            labels=processes.gathered(self.labels),
            clean_loss=processes.gathered(self.clean_loss),
            clean_correct=processes.gathered(self.clean_correct),
            loss=processes.gathered(self.loss.T.contiguous()).T,
            correct=processes.gathered(self.correct.T.contiguous()).T,
            forward_equivalents=float(spent[0] / spent[1]),
        )


Effects = Outcomes[Unit]
JointEffects = Outcomes[tuple[Unit, ...]]
