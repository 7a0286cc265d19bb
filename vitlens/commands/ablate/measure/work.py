"""What all parts of a run of `vitlens ablate` need: model, images in batches, and what an earlier attempt measured."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.ablation.joint import BatchOutcomes
from vitlens.analysis.ablation.replacements import other_images
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.archives import Form
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.scaffold.digests import batch_digest
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress_store import ProgressStore
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.processes import Processes


@dataclass(frozen=True)
class AblationRun:
    """labels: (n,), columns of the model's logits; options: with the replacements that so many images allow; run: its
    run options as they hold in this process."""

    model: Model
    split: Split
    labels: Tensor
    units: tuple[Unit, ...]
    options: AblateOptions
    processes: Processes
    run: RunOptions
    store: ProgressStore

    @property
    def heads(self) -> tuple[Unit, ...]:
        """The units that are heads."""
        return tuple(unit for unit in self.units if unit.kind == "head")

    @property
    def replacement(self) -> Replacement:
        """The replacement of the figures, and of everything that takes only one."""
        return self.options.replace[0]

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.run.batch_size or fitting_batch_size(self.model)

    def groups(self, indices: Tensor | None = None) -> Tensor | None:
        """What images share (n,), of all or of some; None where they share nothing."""
        groups = self.split.groups
        return groups if groups is None or indices is None else groups[indices]

    def share(self, indices: Tensor) -> Tensor:
        """Those of some images that belong to this process."""
        return indices[self.processes.index :: self.processes.count]

    def batches(self, indices: Tensor | None = None) -> "Iterator[LabelledBatch]":
        """This process's images, in batches that fit; indices: of those to take (None: all).

        The donor of an image is drawn from all images, so that results do not depend on the batches.
        """
        mine = self.share(torch.arange(len(self.split)) if indices is None else indices)
        split, device = self.split.pick(mine), self.model.device
        resampled = "resample" in self.options.replace
        others = other_images(len(self.split), seed=self.run.seed) if resampled else None
        for batch in split.batches(self.batch_size, device=device):
            own = mine[batch.indices]
            donors = None
            if others is not None:
                (donors, *_), *_ = self.split.pick(others[own]).batches(len(own), device=device)
            yield LabelledBatch(batch.images, self.labels[own].to(device), int(batch.indices[0]), donors)

    def memory(self, replace: Replacement, batch: "LabelledBatch") -> "BatchMemory | None":
        """What is known of one batch with one replacement; None where nothing is kept."""
        if self.store.folder is None:
            return None
        digest = batch_digest(batch.images, batch.labels)
        return BatchMemory(self.store, f"{replace}-{batch.offset}", digest, len(batch.labels))


@dataclass(frozen=True)
class LabelledBatch:
    """Images, labels as columns of the logits, and the index of the first image in this process's share.

    donors: for each image the one whose output replaces its own, where units are resampled.
    """

    images: Tensor
    labels: Tensor
    offset: int
    donors: Tensor | None = None


@dataclass(frozen=True)
class BatchMemory:
    """The outcomes of one batch, kept for the units that begin at one layer at a time; digest: of its images and
    labels; count: how many they are."""

    store: ProgressStore
    key: str
    digest: str
    count: int

    def recall(self, sets: Sequence[tuple[Unit, ...]]) -> BatchOutcomes | None:
        """The outcomes that were kept, or None. Raises InputError when they are of other images, or damaged."""
        sides = (len(sets), self.count)
        forms = {"loss": Form("f", sides), "correct": Form("b", sides), "cost": Form("iu")}
        arrays = self.store.recall(self._key(sets), self.digest, forms)
        if arrays is None:
            return None
        loss, correct = (torch.from_numpy(np.asarray(arrays[name])) for name in ("loss", "correct"))
        return BatchOutcomes(loss, correct, int(arrays["cost"]))

    def remember(self, sets: Sequence[tuple[Unit, ...]], outcomes: BatchOutcomes) -> None:
        """Keep outcomes, all or nothing."""
        arrays = {
            "loss": outcomes.loss.numpy(),
            "correct": outcomes.correct.numpy(),
            "cost": np.array(outcomes.cost),
        }
        self.store.remember(self._key(sets), self.digest, arrays)

    def _key(self, sets: Sequence[tuple[Unit, ...]]) -> str:
        names = ",".join("+".join(unit.name for unit in each) for each in sets)
        return f"{self.key}-{hashlib.sha256(names.encode()).hexdigest()[:16]}"


def finite(value: Tensor | float) -> float | None:
    """A number as a row holds it: None for NaN and infinities."""
    number = float(value)
    return number if np.isfinite(number) else None
