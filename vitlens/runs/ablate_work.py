"""What `vitlens ablate` is to do, and what it has found."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitlens.analysis.ablation.adaptive import Adaptive
from vitlens.analysis.ablation.effects import Effects, Unit
from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.ablation.pairs import Redundancy, Synergy
from vitlens.analysis.ablation.removal import AblationCurve
from vitlens.analysis.ablation.replacements import other_images
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.processes import Processes
from vitlens.runs.ablate_choices import AblateChoices
from vitlens.runs.ablate_progress import Store
from vitlens.runs.options import RunOptions
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Work:
    """What all steps of a run need. labels: (n,), columns of the model's logits."""

    model: Model
    split: Split
    labels: Tensor
    units: tuple[Unit, ...]
    choices: AblateChoices
    processes: Processes
    options: RunOptions
    store: Store

    @property
    def heads(self) -> tuple[Unit, ...]:
        """The units that are heads."""
        return tuple(unit for unit in self.units if unit.kind == "head")

    def batches(self, indices: Tensor | None = None) -> "Iterator[Part]":
        """This process's images, a batch that fits at a time; indices: of those to take (None: all).

        Where a unit takes another image's output, that is one of all images, so that it does not depend on batches.
        """
        chosen = torch.arange(len(self.split)) if indices is None else indices
        mine = chosen[self.processes.index :: self.processes.count]
        size = self.options.batch_size or fitting_batch_size(self.model)
        split, device = self.split.pick(mine), self.model.device
        resampled = "resample" in self.choices.replace
        others = other_images(len(self.split), seed=self.options.seed) if resampled else None
        for batch in split.batches(size, device=device):
            own = mine[batch.indices]
            donors = None
            if others is not None:
                (donors, *_), *_ = self.split.pick(others[own]).batches(len(own), device=device)
            yield Part(batch.images, self.labels[own].to(device), int(batch.indices[0]), donors)


@dataclass(frozen=True)
class Part:
    """A batch: images, labels as columns of the logits, and the place of its first image in this process's share.

    donors: for each image the one whose output stands in, where units are resampled.
    """

    images: Tensor
    labels: Tensor
    offset: int
    donors: Tensor | None = None


@dataclass
class Found:
    """What was measured; only what was asked for is there.

    effects, firsts: of each replacement, per image; importance: the same summarised; curves: of each order, on images
    that the order was not chosen on (ranked_on images); removable: the share of heads that can go at a point of
    accuracy; greedy_cost: forward-equivalents of that order.
    """

    effects: dict[Replacement, Effects] = field(default_factory=dict)
    firsts: dict[Replacement, Tensor] = field(default_factory=dict)
    importance: dict[Replacement, Importance] = field(default_factory=dict)
    curves: dict[str, AblationCurve] = field(default_factory=dict)
    ranked_on: int = 0
    removable: Estimate | None = None
    greedy_cost: float | None = None
    redundancy: Redundancy | None = None
    synergy: Synergy | None = None
    adaptive: Adaptive | None = None
