"""The run, labels and units that all measurements of `vitlens ablate` share."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.ablation import bench as ablation
from vitlens.analysis.ablation.outcomes import Memory, Stored
from vitlens.analysis.ablation.units import Removal, Unit
from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.arrays import Form
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.run.progress import ProgressStore
from vitlens.commands.run.resume import batch_digest
from vitlens.commands.run.run import Run
from vitlens.lens.capture import Means
from vitlens.names import Replacement
from vitlens.pixels import Streamed

_KEY_DIGITS: Final = 16  # hexadecimal digits of the digest that names stored outcomes


@dataclass(frozen=True)
class AblationSetup:
    """A run of `vitlens ablate` with its labels and units.

    run: its options name at least one replacement.
    labels: (n,) columns of the model's logits.
    store: outcomes of the batches that a stopped run has measured.
    means: mean outputs of the units, None if they are not needed.
    dictionary: the dictionary of the latents among the units.
    """

    run: Run[AblateOptions]
    labels: Tensor
    units: tuple[Unit, ...]
    store: ProgressStore
    means: Means | None = None
    dictionary: Dictionary | None = None

    @property
    def heads(self) -> tuple[Unit, ...]:
        """Return the units that are heads."""
        return tuple(unit for unit in self.units if unit.kind == "head")

    @property
    def replacement(self) -> Replacement:
        """Return the replacement of the figures, and of measurements with a single replacement."""
        return self.run.options.replace[0]

    @property
    def batch_size(self) -> int:
        """Return the number of images in a batch."""
        return self.run.run_options.batch_size or fitting_batch_size(self.run.model)

    @property
    def images(self) -> int:
        """Return the number of images."""
        return len(self.run.split)

    @property
    def seed(self) -> int:
        """Return the seed of every random number."""
        return self.run.run_options.seed

    def groups(self, indices: Tensor | None = None) -> Tensor | None:
        """Return the groups of all images (n,) or of those at some indices.

        Returns None for images without groups.
        """
        groups = self.run.split.groups
        if groups is None or indices is None:
            return groups
        return groups[indices]

    def first_images(self, most: int) -> Tensor:
        """Return the indices of the first images, at most this many."""
        return torch.arange(min(most, self.images))

    def for_replacement(self, replacement: Replacement) -> ablation.Bench:
        """Return the bench of the analysis for one of the replacements."""
        run = self.run
        return ablation.Bench(
            model=run.model,
            images=Streamed(run.split, run.model.pixel_dtype),
            labels=self.labels,
            by=replacement,
            groups=self.groups(),
            seed=self.seed,
            batch_size=self.batch_size,
            processes=run.processes,
            means=self.means,
            progress=run.progress,
            memory=self._memory,
        )

    def measure_means(self) -> Means | None:
        """Return the mean outputs of the units over all processes, None if no measurement needs
        them.

        A single batch with all images needs none: its pass through the unchanged model gives them.
        """
        options = self.run.options
        if "mean" not in options.replace:
            return None
        bench = self.for_replacement("mean")
        removes_several = options.curves or options.pairs
        if bench.one_batch and not removes_several:
            return None
        return bench.with_means(self.units).means

    def _memory(self, name: str, images: Tensor, labels: Tensor) -> Memory:
        """Return a function that recalls the outcomes of one batch, or measures and stores them.

        The bench calls this for each batch, and the function for each group of removals. The
        function raises InputError if stored outcomes are damaged or belong to other images.

        name: of the measurement and its replacement.
        """
        digest = batch_digest(images, labels)

        def recall(sets: Sequence[Removal], measure: Callable[[], Stored]) -> Stored:
            # the key says which removals these are, the digest on which images
            key = f"{name}-{_digest_of(sets)}"
            shape = (len(sets), len(labels))
            # the letters are kinds of NumPy's dtypes: "f" floats, "b" bools, "iu" integers
            forms = {"log_odds": Form("f", shape), "correct": Form("b", shape), "cost": Form("iu")}
            arrays = self.store.recall(key, digest, forms)
            if arrays is not None:
                return _outcomes(arrays)
            outcomes = measure()
            self.store.remember(key, digest, _arrays(outcomes))
            return outcomes

        return recall


def _digest_of(sets: Sequence[Removal]) -> str:
    """Return a digest of the names of the removed units."""
    names = []
    for units in sets:
        names.append("+".join(unit.name for unit in units))
    return hashlib.sha256(",".join(names).encode()).hexdigest()[:_KEY_DIGITS]


def _arrays(outcomes: Stored) -> dict[str, NDArray[np.generic]]:
    return {
        "log_odds": outcomes.log_odds.numpy(),
        "correct": outcomes.correct.numpy(),
        "cost": np.array(outcomes.cost),
    }


def _outcomes(arrays: Mapping[str, NDArray[np.generic]]) -> Stored:
    return Stored(
        log_odds=torch.from_numpy(np.asarray(arrays["log_odds"])),
        correct=torch.from_numpy(np.asarray(arrays["correct"])),
        cost=int(arrays["cost"]),
    )


def name_of(unit: Unit) -> str:
    """Return the name of a unit in the record: L3.H7, L3.MLP, L3.block, L3.latent70."""
    if unit.kind == "head":
        part = f"H{unit.head}"
    elif unit.kind == "mlp":
        part = "MLP"
    elif unit.kind == "latent":
        part = f"latent{unit.latent}"
    else:
        part = unit.kind
    return f"L{unit.layer}.{part}"
