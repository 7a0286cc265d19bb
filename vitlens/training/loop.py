"""The loop: epochs of steps, a look at the test images, a checkpoint, until the recipe is through.

The result depends on (specimen, data, recipe, seed, number of processes) alone. Orders, augmentation and dropout are
derived from (seed, epoch, step), so a run that was killed goes on from its checkpoint as if nothing had happened.
Several processes take shares of the same global batches; their averaged gradients are those of one process, except for
batch normalisation, whose statistics are per process (a CNN then sees smaller batches), and dropout, drawn per process.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ContextManager, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.split import Source, Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import DataError, InputError, NonFiniteError
from vitlens.models import zoo
from vitlens.models.specimen import Specimen, trainable
from vitlens.training.augment import augment
from vitlens.training.average import Average, copy_into
from vitlens.training.checkpoint import (
    Checkpoint,
    collect,
    read_checkpoint,
    require_same,
    restore,
    write_checkpoint,
)
from vitlens.training.clock import Clock
from vitlens.training.feed import Portion, derive, epoch_batches, portions, share
from vitlens.training.metrics import (
    EpochMetrics,
    Progress,
    TrainingResult,
    append_metrics,
    rewrite_metrics,
)
from vitlens.training.optimiser import adamw
from vitlens.training.processes import agree_on_buffers, join, place, total, wrap
from vitlens.training.recipe import Recipe
from vitlens.training.schedule import learning_rate

BEST_FILE = "best.safetensors"
_PROGRESS_INTERVAL = 0.1  # seconds
_TEST_BATCH = 256


def fit(
    specimen: Specimen,
    train: Split,
    test: Split,
    *,
    recipe: Recipe,
    directory: Path,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: str = "auto",
    resume: bool = False,
    checkpoint_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train a specimen, which ends with the last weights (averaged ones where the recipe averages).

    directory: gets metrics.jsonl, model.safetensors (those weights), best.safetensors and checkpoint/, each written
    whole; resume: go on from its checkpoint, or begin when there is none yet; checkpoint_every: steps between
    checkpoints within an epoch (None: one at each epoch's end). Raises InputError when data, model, or the checkpoint
    do not fit together, NonFiniteError when the loss does (files and specimen keep the last good weights),
    StorageError when the disk is full (the previous checkpoint survives).
    """
    _check(specimen, train, test)
    accelerator = join(torch.device(device))
    if recipe.batch_size < accelerator.num_processes:
        raise InputError(
            f"expected --batch-size of at least {accelerator.num_processes}, one image a process, found {recipe.batch_size}"
        )
    device = place(accelerator, torch.device(device))
    task = _Task(specimen, train, test, recipe, directory, seed, device, precision, checkpoint_every)
    specimen.to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), trainable(specimen):
        training = _Training(task, accelerator, on_progress)
        training.begin(resume=resume)
        return training.run()


@dataclass(frozen=True)
class _Task:
    """What was asked for, and what follows from it."""

    specimen: Specimen
    train: Split
    test: Split
    recipe: Recipe
    directory: Path
    seed: int
    device: torch.device
    precision: str
    checkpoint_every: int | None

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
        """Steps in all."""
        return self.recipe.epochs * self.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """The rate of a step."""
        recipe = self.recipe
        return learning_rate(
            step,
            total=self.steps,
            warmup=round(recipe.warmup * self.steps),
            peak=recipe.learning_rate,
            minimum=recipe.minimum * recipe.learning_rate,
        )

    def source(self, epoch: int) -> Source:
        """Where an epoch's pixels come from: rendered anew where the data can."""
        return self.train.source

    def augmented(self, portion: Portion, epoch: int) -> Tensor:
        """A portion's images on the device, augmented."""
        pixels = portion.pixels.to(self.device, non_blocking=True)
        padding, flip = self.recipe.crop_padding, self.recipe.flip
        return augment(pixels, portion.indices, seed=self.seed, epoch=epoch, crop_padding=padding, flip=flip)

    def labels(self, indices: Tensor) -> Tensor:
        """Their labels on the device."""
        assert self.train.labels is not None
        return self.train.labels[indices].to(self.device)

    def identity(self) -> dict[str, object]:
        """What a checkpoint must share with the run that goes on from it."""
        return {
            "architecture": self.specimen.architecture,
            "classes": list(self.specimen.classes),
            "recipe": self.recipe.numbers(),
            "data": {"name": self.train.name, "train": len(self.train), "test": len(self.test)},
            "seed": self.seed,
        }


@dataclass(frozen=True)
class _Standing:
    """What is known besides tensors: the epochs done, and the best look at the test images."""

    history: tuple[EpochMetrics, ...] = ()
    best_accuracy: float = -1.0
    best_epoch: int = -1

    def after(self, metrics: EpochMetrics) -> "_Standing":
        """The standing one epoch later."""
        history, accuracy = (*self.history, metrics), metrics.test_accuracy
        if accuracy is None or accuracy <= self.best_accuracy:
            return replace(self, history=history)
        return _Standing(history, accuracy, metrics.epoch)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "_Standing":
        """As a checkpoint keeps it."""
        history = tuple(EpochMetrics(**metrics) for metrics in stored["history"])
        return cls(history, stored["best_accuracy"], stored["best_epoch"])


class _Training:
    """One run of the loop in one process."""

    def __init__(self, task: _Task, accelerator: Accelerator, on_progress: Callable[[Progress], None] | None) -> None:
        recipe, model = task.recipe, task.specimen.model
        self.task, self.accelerator, self.on_progress = task, accelerator, on_progress
        self.average = Average(model, decay=recipe.average) if recipe.average else None
        self.optimizer = adamw(
            model, learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=recipe.betas
        )
        self.wrapped = wrap(accelerator, task.specimen)
        self.step = 0
        self.sums = torch.zeros(3, dtype=torch.float64)  # loss, correct and images of this epoch, in this process
        self.standing = _Standing()
        self.clock = Clock()
        self.reported = 0.0

    def begin(self, *, resume: bool) -> None:
        """Take up the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        self.accelerator.wait_for_everyone()  # nobody writes before all have read
        if checkpoint is not None:
            self._take_up(checkpoint)
        if self.accelerator.is_main_process:
            rewrite_metrics(self.task.directory, self.standing.history)
        if checkpoint is None:
            self._write_checkpoint()

    def run(self) -> TrainingResult:
        """All epochs that are left."""
        while self.step < self.task.steps:
            self._epoch()
        if self.average is not None:
            copy_into(self.task.specimen.model, self.average.tensors)
        standing, directory = self.standing, self.task.directory
        accuracy = standing.history[-1].test_accuracy
        assert accuracy is not None  # the last epoch always looks
        return TrainingResult(
            history=standing.history,
            accuracy=accuracy,
            best_accuracy=standing.best_accuracy,
            best_epoch=standing.best_epoch,
            seconds=standing.history[-1].seconds,
            weights=directory / zoo.WEIGHTS_FILE,
            best_weights=directory / BEST_FILE,
        )

    def _take_up(self, checkpoint: Checkpoint) -> None:
        facts = checkpoint.facts
        require_same(facts["identity"], self.task.identity(), folder=self.task.directory)
        restore(checkpoint, self.task.specimen.model, self.optimizer, self.average)
        self.step = facts["step"]
        if self.average is not None:
            self.average.updates = self.step
        if self.accelerator.is_main_process:  # the others' sums are in the first one's
            self.sums.copy_(checkpoint.tensors["sums"])
        self.standing = _Standing.from_json(facts["standing"])
        self.clock = Clock(seconds=facts["seconds"])

    def _epoch(self) -> None:
        task, recipe, place = self.task, self.task.recipe, self.accelerator.process_index
        epoch, within = divmod(self.step, task.steps_per_epoch)
        self.clock.begin_epoch()
        batches = epoch_batches(len(task.train), recipe.batch_size, seed=task.seed, epoch=epoch)[within:]
        mine = [share(batch, place, self.accelerator.num_processes) for batch in batches]
        source = task.source(epoch)
        for portion, batch in zip(portions(source, mine, pin=task.device.type == "cuda"), batches):
            self._step(task.augmented(portion, epoch), task.labels(portion.indices), whole=len(batch))
            self._report(epoch)
            between = self.step % task.steps_per_epoch  # at the end the epoch writes its own
            if task.checkpoint_every and between and self.step % task.checkpoint_every == 0:
                self._write_checkpoint()
        self._end_epoch(epoch)

    def _step(self, images: Tensor, labels: Tensor, *, whole: int) -> None:
        """One update from this process's share of a batch of `whole` images."""
        task, recipe, processes = self.task, self.task.recipe, self.accelerator.num_processes
        torch.manual_seed(derive(task.seed, self.step, self.accelerator.process_index))  # dropout's
        for group in self.optimizer.param_groups:
            group["lr"] = task.learning_rate(self.step)
        with autocast(task.device, task.precision):
            logits = self.wrapped(images).float()
        summed = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing, reduction="sum")
        # gradients are averaged over processes: scaled so, uneven shares weigh by their images
        self.accelerator.backward(summed * processes / whole)
        norm = torch.nn.utils.clip_grad_norm_(task.specimen.parameters(), recipe.clip or math.inf)
        correct = (logits.detach().argmax(1) == labels).sum()
        loss, right, length = torch.stack((summed.detach(), correct, norm.detach())).tolist()  # one wait for the device
        if not math.isfinite(loss + length):
            self._refuse(f"loss {loss / max(len(labels), 1):g}, gradient norm {length:g}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(task.specimen.model)
        self.sums += torch.tensor((loss, right, len(labels)), dtype=torch.float64)
        self.step += 1
        self.clock.count(whole)

    def _end_epoch(self, epoch: int) -> None:
        """Look at the test images when it is time, and write everything down."""
        task = self.task
        loss, correct, images = total(self.accelerator, self.sums, task.device).tolist()
        self.clock.pause()
        due = epoch + 1 == task.recipe.epochs or (epoch + 1) % task.recipe.evaluate_every == 0
        with self._kept_weights():
            test_loss, test_accuracy = self._look() if due else (None, None)
            metrics = EpochMetrics(
                epoch=epoch,
                step=self.step,
                images=self.step * task.batch_size,
                learning_rate=task.learning_rate(self.step - 1),
                train_loss=loss / images,
                train_accuracy=correct / images,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                seconds=self.clock.seconds(),
                images_per_second=self.clock.epoch_rate(),
            )
            self.standing = self.standing.after(metrics)
            if self.accelerator.is_main_process:
                append_metrics(task.directory, metrics)
                self._save_weights(best=self.standing.best_epoch == epoch)
        self._report(epoch, now=True)
        self.sums.zero_()
        self._write_checkpoint()

    def _look(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images, each process looking at its share."""
        task = self.task
        agree_on_buffers(self.accelerator, task.specimen)
        mine = share(torch.arange(len(task.test)), self.accelerator.process_index, self.accelerator.num_processes)
        sums = torch.zeros(2, dtype=torch.float64)
        with evaluating(task.specimen), torch.inference_mode(), autocast(task.device, task.precision):
            for batch in task.test.pick(mine).batches(_TEST_BATCH, device=task.device):
                assert batch.labels is not None
                logits = task.specimen(batch.images).float()
                loss = F.cross_entropy(logits, batch.labels, reduction="sum")
                correct = (logits.argmax(1) == batch.labels).sum()
                sums += torch.stack((loss.double(), correct.double())).cpu()
        loss, correct = (total(self.accelerator, sums, task.device) / len(task.test)).tolist()
        if not math.isfinite(loss):
            self._refuse(f"test loss {loss:g}")
        return loss, correct

    def _kept_weights(self) -> ContextManager[None]:
        """The weights that are tested and kept, in place of the trained ones for a while."""
        return nullcontext() if self.average is None else self.average.applied(self.task.specimen.model)

    def _save_weights(self, *, best: bool) -> None:
        for name in (zoo.WEIGHTS_FILE, BEST_FILE)[: 1 + best]:
            zoo.save(self.task.specimen, self.task.directory / name)

    def _write_checkpoint(self) -> None:
        sums = total(self.accelerator, self.sums, self.task.device)
        if not self.accelerator.is_main_process:
            return
        tensors = collect(self.task.specimen.model, self.optimizer, self.average)
        if not all(value.isfinite().all() for value in tensors.values()):
            self._refuse("a weight that is not finite")
        facts = {
            "identity": self.task.identity(),
            "step": self.step,
            "seconds": self.clock.seconds(),
            "standing": asdict(self.standing),
        }
        write_checkpoint(self.task.directory, Checkpoint({**tensors, "sums": sums.cpu()}, facts))

    def _refuse(self, found: str) -> NoReturn:
        epoch = self.step // self.task.steps_per_epoch
        raise NonFiniteError(
            f"expected a finite loss, found {found} in epoch {epoch + 1}, step {self.step + 1}; {self.task.directory} "
            f"keeps the weights of epoch {len(self.standing.history)}; try --learning-rate "
            f"{self.task.recipe.learning_rate / 3:.1g} or --precision fp32"
        )

    def _report(self, epoch: int, *, now: bool = False) -> None:
        """Tell whoever listens, not more often than an eye can follow."""
        if self.on_progress is None or not self.accelerator.is_main_process:
            return
        if not now and time.perf_counter() - self.reported < _PROGRESS_INTERVAL:
            return
        self.reported = time.perf_counter()
        loss, correct, images = self.sums.tolist()
        looks = [metrics.test_accuracy for metrics in self.standing.history if metrics.test_accuracy is not None]
        self.on_progress(
            Progress(
                epoch=epoch,
                epochs=self.task.recipe.epochs,
                step=self.step,
                steps=self.task.steps,
                loss=loss / images,
                accuracy=correct / images,
                test_accuracy=looks[-1] if looks else None,
                images_per_second=self.clock.rate(),
                seconds_left=self.clock.seconds_left((self.task.steps - self.step) * self.task.batch_size),
            )
        )


def _check(specimen: Specimen, train: Split, test: Split) -> None:
    """Refuse data that this model cannot be trained or tested on."""
    for split in (train, test):
        if not len(split) or split.labels is None:
            found = "none" if not len(split) else "images without labels"
            raise DataError(f"expected labelled {split.part} images in {split.name}, found {found}; see vitlens data")
        if split.classes != specimen.classes:
            raise InputError(
                f"expected a model of {split.name}'s {len(split.classes)} classes, found {specimen.alias} with "
                f"{len(specimen.classes)} (or other names)"
            )
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= len(specimen.classes):
            raise DataError(
                f"expected labels from 0 to {len(specimen.classes) - 1} in {split.name}, found {low} to {high}"
            )
