"""The model, the images and the stored outcomes that all measurements of `vitlens ablate` share."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.ablation.importance import MeanChange
from vitlens.analysis.ablation.joint import BatchOutcomes
from vitlens.analysis.ablation.replacements import MeanOutputs, means_of, other_images
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.archives import Form
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.run.digests import batch_digest
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.progress.store import ProgressStore
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.processes import Processes
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Bench:
    """What is measured on. labels: (n,), columns of the model's logits; options: with their default replacement chosen;
    run: the run options of this process."""

    model: Model
    split: Split
    labels: Tensor
    units: tuple[Unit, ...]
    options: AblateOptions
    processes: Processes
    run: RunOptions
    store: ProgressStore
    means: MeanOutputs | None = None

    @property
    def heads(self) -> tuple[Unit, ...]:
        """The units that are heads."""
        return tuple(unit for unit in self.units if unit.kind == "head")

    @property
    def replacement(self) -> Replacement:
        """The replacement of the figures, and of all measurements that use only one."""
        return self.options.replace[0]

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.run.batch_size or fitting_batch_size(self.model)

    def groups(self, indices: Tensor | None = None) -> Tensor | None:
        """The groups of the images (n,), or of those at these indices; None where images have no groups."""
        groups = self.split.groups
        return groups if groups is None or indices is None else groups[indices]

    def share(self, indices: Tensor) -> Tensor:
        """The part of these indices that belongs to this process."""
        return indices[self.processes.index :: self.processes.count]

    def batches(self, indices: Tensor | None = None) -> "Iterator[LabelledBatch]":
        """This process's images in batches that fit into memory; indices: of the images to take (None: all).

        The donor of an image is drawn from all images, so that results do not depend on the batches.
        """
        own_indices = self.share(torch.arange(len(self.split)) if indices is None else indices)
        split, device = self.split.pick(own_indices), self.model.device
        resampled = "resample" in self.options.replace
        others = other_images(len(self.split), seed=self.run.seed) if resampled else None
        for batch in split.batches(self.batch_size, device=device):
            positions = own_indices[batch.indices]
            donors = None
            if others is not None:
                (donors, *_), *_ = self.split.pick(others[positions]).batches(len(positions), device=device)
            yield LabelledBatch(batch.images, self.labels[positions].to(device), int(batch.indices[0]), donors)

    def with_means(self) -> "Bench":
        """The same with the mean outputs, where they are needed; without, one batch holds all images, whose clean pass
        gives them."""
        several, alone = self.options.curves or self.options.pairs, self.processes.count == 1
        if "mean" not in self.options.replace or (alone and not several and len(self.split) <= self.batch_size):
            return self
        with progress("Mean outputs", len(self.split), quiet=self.run.quiet) as advance:

            def images() -> Iterator[Tensor]:
                for batch in self.batches():
                    yield batch.images
                    advance(len(batch.images) * self.processes.count)

            means = means_of(self.model, images())
        means.join(self.processes.total)
        return replace(self, means=means)

    def rounds(
        self, what: str, removals: int, indices: Tensor | None = None
    ) -> "Iterator[tuple[LabelledBatch, dict[str, Any]]]":
        """`batches` with progress, each with what every measurement takes; removals: done on each image."""
        total = removals * len(self.share(torch.arange(len(self.split)) if indices is None else indices))
        with progress(what, total, unit="removals", quiet=self.run.quiet) as advance:
            for batch in self.batches(indices):

                def done(removed: int, images: int = len(batch.images)) -> None:
                    advance(removed * images)

                common = {"means": self.means, "donors": batch.donors, "seed": self.run.seed, "offset": batch.offset}
                yield batch, {**common, "advance": done}

    def memory(self, replacement: Replacement, batch: "LabelledBatch") -> "BatchMemory | None":
        """The stored outcomes of one batch with one replacement; None where nothing is stored."""
        if self.store.folder is None:
            return None
        digest = batch_digest(batch.images, batch.labels)
        return BatchMemory(self.store, f"{replacement}-{batch.offset}", digest, len(batch.labels))


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
    """The stored outcomes of one batch, in parts for the units of one layer; digest: of its images and labels; count:
    their number."""

    store: ProgressStore
    key: str
    digest: str
    count: int

    def recall(self, sets: Sequence[tuple[Unit, ...]]) -> BatchOutcomes | None:
        """The stored outcomes, or None. Raises InputError when they are of other images, or damaged."""
        sides = (len(sets), self.count)
        forms = {"loss": Form("f", sides), "correct": Form("b", sides), "cost": Form("iu")}
        arrays = self.store.recall(self._key(sets), self.digest, forms)
        if arrays is None:
            return None
        loss, correct = (torch.from_numpy(np.asarray(arrays[name])) for name in ("loss", "correct"))
        return BatchOutcomes(loss, correct, int(arrays["cost"]))

    def remember(self, sets: Sequence[tuple[Unit, ...]], outcomes: BatchOutcomes) -> None:
        """Store outcomes, completely or not at all."""
        arrays = {"loss": outcomes.loss.numpy(), "correct": outcomes.correct.numpy(), "cost": np.array(outcomes.cost)}
        self.store.remember(self._key(sets), self.digest, arrays)

    def _key(self, sets: Sequence[tuple[Unit, ...]]) -> str:
        names = ",".join("+".join(unit.name for unit in each) for each in sets)
        return f"{self.key}-{hashlib.sha256(names.encode()).hexdigest()[:16]}"


def finite(value: Tensor | float) -> float | None:
    """A number for a row: None for NaN and infinities."""
    number = float(value)
    return number if np.isfinite(number) else None


def estimate_of(change: MeanChange, index: int, n: int, unit: str) -> Estimate:
    """One mean change with its interval; without one where it is not defined."""
    low, high = finite(change.low[index]), finite(change.high[index])
    if low is None or high is None:
        low = high = None
    return Estimate(float(change.mean[index]), low, high, n, unit)


def name_of(unit: Unit) -> str:
    """A unit as it is recorded: L3.H7, L3.MLP, L3.block."""
    part = f"H{unit.head}" if unit.kind == "head" else "MLP" if unit.kind == "mlp" else unit.kind
    return f"L{unit.layer}.{part}"
