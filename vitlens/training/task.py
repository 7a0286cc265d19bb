"""Task: the model, data, recipe and objective of a training, the images of its steps, and the order of those."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.data.split import Source, Split
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model
from vitlens.processes import Processes
from vitlens.shapes import Images, Pixels
from vitlens.training.augment import augment, mix
from vitlens.training.feed import Portion, derive_seed, epoch_batches, portions, process_share, resident
from vitlens.training.metrics import Progress, Watcher
from vitlens.training.optimiser import learning_rate
from vitlens.training.recipe import Recipe

SHOWN: Final = 12  # images of the first batch
_ALONE: Final = Processes(0, 1, torch.device("cpu"))


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
    """The settings of a training, and what follows from them; began: when the run began, of time.perf_counter."""

    model: Model
    train: Split
    test: Split
    recipe: Recipe
    directory: Path = Path()
    seed: int = 0
    processes: Processes = _ALONE
    precision: str = "fp32"
    checkpoint_every: int | None = None  # steps
    keep_every: int | None = None  # epochs
    train_last: int | None = None  # blocks, with the layers after them; None: everything
    objective: Objective = field(default_factory=LabelObjective)
    watchers: Sequence[Watcher] = ()
    on_progress: Callable[[Progress], None] | None = None
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        count = self.processes.count
        if self.batch_size < count:
            raise InputError(f"expected --batch-size of at least {count}, one per process, found {self.batch_size}")

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.processes.device

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
        return learning_rate(step, self.recipe, total=self.steps)

    @cached_property
    def _stored(self) -> Source:
        return resident(self.train.source, self.device)

    def source(self, epoch: int) -> Source:
        """The source of an epoch's pixels: newly rendered where the data is generated, on the device where they fit."""
        source = self.train.epoch(epoch).source
        return self._stored if source is self.train.source else source

    def shares(self, epoch: int) -> list[Tensor]:
        """The keys of this process's share of each batch of an epoch, see feed.epoch_batches."""
        batches = epoch_batches(
            len(self.train), self.recipe.batch_size, seed=self.seed, epoch=epoch, views=self.recipe.views
        )
        return [process_share(batch, self.processes.index, self.processes.count) for batch in batches]

    def augmented(self, portion: Portion, epoch: int) -> Images:
        """A portion's images on the device, augmented."""
        pixels = portion.pixels.to(self.device, non_blocking=True)
        return augment(pixels, portion.keys, self.recipe, seed=self.seed, epoch=epoch)

    def mixed(self, images: Tensor, labels: Tensor, *, step: int) -> tuple[Tensor, Tensor]:
        """Images mixed by the recipe's mixup and cutmix, and their targets.

        Seeds torch's generator, which mixing and dropout draw from, by the step and the process.
        """
        torch.manual_seed(derive_seed(self.seed, step, self.processes.index))
        return mix(images, labels, self.recipe, classes=len(self.model.classes))

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
    present = []
    for split in (train, test):
        if not len(split) or split.labels is None:
            problem = "none" if not len(split) else "images without labels"
            raise DataError(f"expected labelled {split.part} images in {split.name}, found {problem}; see vitlens data")
        if split.classes != model.classes:
            raise InputError(
                f"expected a model of {split.name}'s {len(split.classes)} classes, found {model.alias} with "
                f"{len(model.classes)} (or other names)"
            )
        present.append(set(split.labels.tolist()))
        low, high, last = min(present[-1]), max(present[-1]), len(model.classes) - 1
        if low < 0 or high > last:
            raise DataError(f"expected labels from 0 to {last} in {split.name}, found {low} to {high}")
    missing = sorted(present[1] - present[0])
    if missing:
        names = ", ".join(test.classes[label] for label in missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise DataError(
            f"expected training images of every class tested in {train.name}, found none of {len(missing)} ({names}); "
            "remove these from the test part, or raise --limit"
        )


@dataclass(frozen=True)
class FirstBatch:
    """The first images of the first batch. given: their pixels; trained: in [0, 1], after augmentation and mixing;
    labels: of the images as given; targets: shares of the classes, before label smoothing."""

    given: Pixels
    trained: Images
    labels: Int[Tensor, " batch"]
    targets: Float[Tensor, "batch classes"]


def first_batch(model: Model, train: Split, recipe: Recipe, *, seed: int, processes: int = 1) -> FirstBatch:
    """The first images, at most SHOWN, of the first batch of `fit`, in the first of several processes.

    Torch's random state is left as it was. Mixing pairs each image with the one before it, so that only one more has to
    be read: the batch's last.
    """
    cpu = Processes(0, processes, torch.device("cpu"))
    task = Task(model, train, train, recipe, seed=seed, processes=cpu)
    share = task.shares(0)[0]
    whole = len(share) <= SHOWN + 1
    (portion,) = portions(train.source, [share if whole else torch.cat((share[-1:], share[:SHOWN]))], pin=False)
    labels = task.labels(portion.indices)
    with torch.random.fork_rng(devices=[]):
        trained, targets = task.mixed(task.augmented(portion, 0), labels, step=0)
    shares = F.one_hot(targets.long(), len(model.classes)).float() if targets.ndim == 1 else targets
    shown = slice(0, SHOWN) if whole else slice(1, None)
    return FirstBatch(portion.pixels[shown].cpu(), trained[shown], labels[shown], shares[shown])
