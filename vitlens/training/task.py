"""Task: the model, data, recipe and objective of a training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.data.split import Source, Split
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model
from vitlens.training.augment import augment, mix
from vitlens.training.feed import Portion, derive_seed, resident
from vitlens.training.optimiser import learning_rate
from vitlens.training.recipe import Recipe


@runtime_checkable
class Objective(Protocol):
    """The objective of a training: the module that is run, and the loss of its output."""

    def module(self, model: Model) -> nn.Module:
        """The module that is run (wrapped for several processes): images -> outputs."""
        ...

    def logits(self, outputs: Any) -> Tensor:
        """The logits (batch, classes), for the accuracy."""
        ...

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        """Loss summed over the images; targets: labels (batch,) or shares of the classes (batch, classes)."""
        ...

    def identity(self) -> Mapping[str, object]:
        """What must be the same in a resumed run, besides model, data and recipe."""
        ...


class LabelObjective:
    """Cross-entropy of the logits with the labels. frozen: of a head on features, which backbone and how many views."""

    def __init__(self, frozen: Mapping[str, object] | None = None) -> None:
        self.frozen = frozen

    def module(self, model: Model) -> nn.Module:
        """The model itself; of a head, its network, which takes features."""
        return model if self.frozen is None else model.module

    def logits(self, outputs: Tensor) -> Tensor:
        """The outputs."""
        return outputs

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:  # noqa: ARG002 - for a teacher
        """Cross-entropy in nats, summed over the images."""
        return F.cross_entropy(outputs.float(), targets, label_smoothing=smoothing, reduction="sum")

    def identity(self) -> Mapping[str, object]:
        """The frozen backbone, if any."""
        return {} if self.frozen is None else {"frozen": self.frozen}


@dataclass(frozen=True)
class Task:
    """The settings of a training, and the numbers that follow from them."""

    model: Model
    train: Split
    test: Split
    recipe: Recipe
    directory: Path
    seed: int
    device: torch.device
    precision: str
    checkpoint_every: int | None
    keep_every: int | None = None
    objective: Objective = field(default_factory=LabelObjective)
    train_last: int | None = None  # blocks, with the layers after them; None: everything

    @property
    def batch_size(self) -> int:
        """Images in a global batch."""
        return min(self.recipe.batch_size, len(self.train))

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return len(self.train) // self.batch_size

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.recipe.epochs * self.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        recipe = self.recipe
        return learning_rate(
            step,
            total=self.steps,
            warmup=round(recipe.warmup * self.steps),
            peak=recipe.learning_rate,
            minimum=recipe.minimum * recipe.learning_rate,
        )

    @cached_property
    def _stored(self) -> Source:
        return resident(self.train.source, self.device)

    def source(self, epoch: int) -> Source:
        """The source of an epoch's pixels: newly rendered where the data is generated, on the device where they fit."""
        source = self.train.epoch(epoch).source
        return self._stored if source is self.train.source else source

    def augmented(self, portion: Portion, epoch: int) -> Tensor:
        """A portion's images on the device, augmented."""
        recipe = self.recipe
        return augment(
            portion.pixels.to(self.device, non_blocking=True),
            portion.keys,
            seed=self.seed,
            epoch=epoch,
            crop_padding=recipe.crop_padding,
            flip=recipe.flip,
            operations=recipe.randaugment,
            magnitude=recipe.magnitude,
            erasing=recipe.erasing,
        )

    def mixed(self, images: Tensor, labels: Tensor, *, step: int, process: int) -> tuple[Tensor, Tensor]:
        """Images mixed by the recipe's mixup and cutmix, and their targets.

        Seeds torch's generator, which mixing and dropout draw from, by the step and the process.
        """
        recipe = self.recipe
        torch.manual_seed(derive_seed(self.seed, step, process))
        if not (recipe.mixup or recipe.cutmix):
            return images, labels
        classes, chance = len(self.model.classes), recipe.mix_chance
        return mix(images, labels, classes=classes, mixup=recipe.mixup, cutmix=recipe.cutmix, chance=chance)

    def labels(self, indices: Tensor) -> Tensor:
        """The labels of these images, on the device."""
        assert self.train.labels is not None
        return self.train.labels[indices.to(self.train.labels.device)].to(self.device)

    def identity(self) -> dict[str, object]:
        """What must be the same in a resumed run."""
        return {
            "architecture": self.model.architecture,
            "classes": list(self.model.classes),
            "recipe": self.recipe.numbers(),
            "data": {
                "name": self.train.name,
                "size": list(self.train.size),
                "train": len(self.train),
                "test": len(self.test),
            },
            "seed": self.seed,
            **({} if self.train_last is None else {"train_last": self.train_last}),
            **self.objective.identity(),
        }


def require_fitting(model: Model, train: Split, test: Split) -> None:
    """Raise InputError or DataError for data on which this model cannot be trained or tested."""
    if len(model.classes) < 2:
        raise DataError(
            f"expected at least 2 classes in {train.name}, found {len(model.classes)}; "
            "give a folder with a subfolder for each class"
        )
    for split in (train, test):
        require_labelled(split)
        assert split.labels is not None
        if split.classes != model.classes:
            raise InputError(
                f"expected a model of {split.name}'s {len(split.classes)} classes, found {model.alias} with "
                f"{len(model.classes)} (or other names)"
            )
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= len(model.classes):
            raise DataError(
                f"expected labels from 0 to {len(model.classes) - 1} in {split.name}, found {low} to {high}"
            )
    _require_examples(train, test)


def require_labelled(split: Split) -> None:
    """Raise DataError for no images, and for images without labels."""
    if not len(split) or split.labels is None:
        problem = "none" if not len(split) else "images without labels"
        raise DataError(f"expected labelled {split.part} images in {split.name}, found {problem}; see vitlens data")


def _require_examples(train: Split, test: Split) -> None:
    """Raise DataError for a class of the test images without training images."""
    assert train.labels is not None
    assert test.labels is not None
    missing = sorted(set(test.labels.tolist()) - set(train.labels.tolist()))
    if missing:
        names = ", ".join(test.classes[label] for label in missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise DataError(
            f"expected training images of every class tested in {train.name}, found none of {len(missing)} ({names}); "
            "remove these from the test part, or raise --limit"
        )
