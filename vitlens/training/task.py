"""The settings of a training, the images of its steps, and their order."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.identity import fingerprints_of
from vitlens.data.split import Source, Split
from vitlens.errors import DataError, InputError, by_caller
from vitlens.models.model import Model
from vitlens.processes import Processes
from vitlens.shapes import Images, Labels, Pixels
from vitlens.training.augment import augment, mix
from vitlens.training.checkpoint import IMAGES, PARTS
from vitlens.training.distill import Objective, StandardObjective
from vitlens.training.feed import derive_seed, epoch_batches, portions, process_share, resident
from vitlens.training.metrics import Progress, Watcher
from vitlens.training.objectives.pretraining import Pretraining
from vitlens.training.optimiser import learning_rate
from vitlens.training.recipe import Recipe

SHOWN: Final = 12  # most images of the first batch that are shown
_MOST_LISTED: Final = 5  # most classes in a message
_SINGLE_PROCESS: Final = Processes(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Task:
    """The settings of a training (see loop.fit), and quantities derived from them.

    model, train, test, recipe, directory, seed, precision, resume, objective, compiling, recompute,
        watchers, on_progress: as in `fit`.
    device: the requested device; that of this process is processes.device.
    checkpoint_every: the number of steps between checkpoints, or None.
    keep_every: the number of epochs between kept weights, or None.
    train_last: the number of last blocks that are trained, with the layers after them, or None for
        everything.
    processes: the processes of the training, and which of them this one is.
    whole: the model with `model` as its head, if only the head is trained on features; else None.
    examples: the number of vectors if the model is not trained on images, else None.
    began: the start of the run, by time.perf_counter.
    """

    model: Model
    train: Split
    test: Split
    recipe: Recipe
    directory: Path = Path()
    seed: int = 0
    device: torch.device | str = "cpu"
    precision: str = "auto"
    resume: bool = False
    checkpoint_every: int | None = None
    keep_every: int | None = None
    objective: Objective = field(default_factory=StandardObjective)
    train_last: int | None = None
    compiling: str = "auto"
    recompute: bool = False
    watchers: Sequence[Watcher] = ()
    on_progress: Callable[[Progress], None] | None = None
    processes: Processes = _SINGLE_PROCESS
    whole: Model | None = None
    examples: int | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def batch_size(self) -> int:
        """Return the number of images in a global batch."""
        return min(self.recipe.batch_size, self._count)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of full batches in an epoch."""
        return self._count // self.batch_size

    @property
    def _count(self) -> int:
        """Return the number of images, or of vectors, in an epoch."""
        if self.examples is not None:
            return self.examples
        return len(self.train)

    @property
    def steps(self) -> int:
        """Return the number of steps of the whole training."""
        return self.recipe.epochs * self.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(step, self.recipe, total=self.steps)

    @cached_property
    def _stored(self) -> Source:
        """Return the source of pixels that are not generated."""
        return resident(self.train.source, self.processes.device)

    def source(self, epoch: int) -> Source:
        """Return the source of an epoch's pixels, newly rendered if the data is generated.

        Pixels that are not generated are on the device if they fit.
        """
        source = self.train.epoch(epoch).source
        if source is self.train.source:  # not generated
            return self._stored
        return source

    def shares(self, epoch: int) -> list[Tensor]:
        """Return the keys of this process's share of each batch; see feed.epoch_batches."""
        batches = epoch_batches(
            len(self.train),
            self.recipe.batch_size,
            seed=self.seed,
            epoch=epoch,
            views=self.recipe.views,
        )
        return [
            process_share(batch, self.processes.index, self.processes.count) for batch in batches
        ]

    def augmented(self, pixels: Pixels, keys: Tensor, epoch: int) -> Images:
        """Return the images on the device, augmented."""
        pixels = pixels.to(self.processes.device, non_blocking=True)
        return augment(pixels, keys, self.recipe, seed=self.seed, epoch=epoch)

    def mixed(self, images: Tensor, labels: Tensor, *, step: int) -> tuple[Tensor, Tensor]:
        """Return images mixed by the recipe's mixup and cutmix, and their targets.

        This seeds torch's generator, from which mixing and dropout draw, by the step and the
        process.
        """
        torch.manual_seed(derive_seed(self.seed, step, self.processes.index))
        return mix(images, labels, self.recipe, classes=len(self.model.classes))

    def targets(self, keys: Tensor) -> Tensor:
        """Return the images' labels on the device, or in a pretraining their keys."""
        if self.pretraining is not None:
            return keys
        return self.labels(keys)

    @property
    def exported(self) -> Model:
        """Return the model that is tested and saved."""
        if self.whole is not None:
            return self.whole
        if self.pretraining is not None:
            return self.pretraining.exported(self.model)
        return self.model

    @property
    def pretraining(self) -> Pretraining | None:
        """Return the objective if it takes no labels, else None."""
        return self.objective if isinstance(self.objective, Pretraining) else None

    def labels(self, keys: Tensor) -> Tensor:
        """Return the labels of these images, on the device."""
        assert self.train.labels is not None
        indices = (keys % len(self.train)).to(self.train.labels.device)
        return self.train.labels[indices].to(self.processes.device)

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the images and labels of each part."""
        return fingerprints_of(dict(zip(PARTS, (self.train, self.test))))

    def identity(self) -> dict[str, object]:
        """Return the settings that must be the same in a resumed run."""
        identity = {
            "architecture": self.model.architecture,
            "classes": list(self.model.classes),
            "recipe": self.recipe.numbers(),
            "data": {
                "name": self.train.name,
                "size": list(self.train.size),
                "train": len(self.train),
                "test": len(self.test),
            },
            IMAGES: self._fingerprints,
            "seed": self.seed,
        }
        if self.train_last is not None:
            identity["train_last"] = self.train_last
        return {**identity, **self.objective.identity()}


def require_fitting(model: Model, train: Split, test: Split) -> None:
    """Raise InputError or DataError for data on which this model cannot be trained or tested."""
    count = len(model.classes)
    if count < 2:
        raise DataError(
            f"expected at least 2 classes in {train.name}, found {count}; give a folder with a "
            "subfolder for each class"
        )
    labels_by_part = []
    for split in (train, test):
        if not len(split) or split.labels is None:
            problem = "none" if not len(split) else "images without labels"
            raise DataError(
                f"expected labelled {split.part} images in {split.name}, found {problem}; see "
                "vitlens data"
            )
        if split.classes != model.classes:
            raise InputError(
                f"expected a model of {split.name}'s {len(split.classes)} classes, found "
                f"{model.alias} with {count} (or other names)"
            )
        labels = set(split.labels.tolist())
        labels_by_part.append(labels)
        low = min(labels)
        high = max(labels)
        if low < 0 or high >= count:
            raise DataError(
                f"expected labels from 0 to {count - 1} in {split.name}, found {low} to {high}"
            )
    train_labels, test_labels = labels_by_part
    missing = sorted(test_labels - train_labels)
    if missing:
        names = ", ".join(test.classes[label] for label in missing[:_MOST_LISTED])
        if len(missing) > _MOST_LISTED:
            names += " ..."
        remedy = by_caller(python="give more training images", command="raise --limit")
        raise DataError(
            f"expected training images of every class tested in {train.name}, found none of "
            f"{len(missing)} ({names}); remove these from the test part, or {remedy}"
        )


class FirstBatch(NamedTuple):
    """The first images of the first batch.

    given: the original pixels.
    trained: the images after augmentation and mixing.
    labels: the labels of the original images.
    targets: the shares of the classes, before label smoothing.
    """

    given: Pixels
    trained: Images
    labels: Labels
    targets: Float[Tensor, "batch classes"]


def first_batch(
    model: Model, train: Split, recipe: Recipe, *, seed: int, processes: int = 1
) -> FirstBatch:
    """Return the first images, at most SHOWN, of the first batch of `fit` in the first process.

    Torch's random state is restored. Mixing pairs each image with the one before it, and the first
    image with the last of the batch. So the last image is read as well, and no other.
    """
    task = Task(
        model=model,
        train=train,
        test=train,
        recipe=recipe,
        seed=seed,
        processes=Processes(0, processes, torch.device("cpu")),
    )
    share = task.shares(0)[0]
    shown = slice(0, SHOWN)
    if len(share) > SHOWN + 1:  # read the last image of the batch, then those that are shown
        share = torch.cat((share[-1:], share[:SHOWN]))
        shown = slice(1, None)
    ((pixels, keys),) = portions(train.source, [share], pin=False)
    labels = task.labels(keys)
    with torch.random.fork_rng(devices=[]):
        trained, targets = task.mixed(task.augmented(pixels, keys, 0), labels, step=0)
    if targets.ndim == 1:
        targets = F.one_hot(targets.long(), len(model.classes)).float()
    return FirstBatch(
        given=pixels[shown].cpu(),
        trained=trained[shown],
        labels=labels[shown],
        targets=targets[shown],
    )
