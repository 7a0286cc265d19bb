"""The loop: epochs of steps, a look at the test images, a checkpoint, until the recipe is through.

The result depends on (specimen, data, recipe, seed, number of processes) alone. Orders, augmentation and dropout are
derived from (seed, epoch, step), so a run that was killed goes on from its checkpoint as if nothing had happened.
Several processes take shares of the same global batches; their averaged gradients are those of one process, except for
batch normalisation, whose statistics are per process (a CNN then sees smaller batches), and dropout, drawn per process.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator

from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models import zoo
from vitlens.models.specimen import Specimen
from vitlens.processes import Processes, accelerated, meeting
from vitlens.training.average import copy_into
from vitlens.training.checkpoint import Checkpoint, read_checkpoint, require_same, told_as_storage, write_checkpoint
from vitlens.training.clock import Clock
from vitlens.training.feed import Portion, decoding, epoch_batches, portions, share
from vitlens.training.finetune import partly_trainable
from vitlens.training.kept import forget_after, keep_weights, require_interval
from vitlens.training.metrics import (
    EpochMetrics,
    Progress,
    Standing,
    TrainingResult,
    append_metrics,
    rewrite_metrics,
)
from vitlens.training.objective import FromLabels, Objective
from vitlens.training.recipe import Recipe
from vitlens.training.speed import Speed, attending, choose, recomputing
from vitlens.training.task import Task, require_fitting
from vitlens.training.update import Updates
from vitlens.training.validation import look
from vitlens.training.watch import StepFacts, Watcher, watched

BEST_FILE = "best.safetensors"
_PROGRESS_INTERVAL = 0.1  # seconds


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
    keep_every: int | None = None,
    objective: Objective | None = None,
    train_last: int | None = None,
    compiling: str = "auto",
    recompute: bool = False,
    watchers: Sequence[Watcher] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train a specimen, which ends with the last weights (averaged ones where the recipe averages).

    directory: gets metrics.jsonl, model.safetensors (those weights), best.safetensors and checkpoint/, each written
    whole; resume: go on from its checkpoint, or begin when there is none yet; checkpoint_every: steps between
    checkpoints within an epoch (None: one at each epoch's end); keep_every: epochs between copies of the weights that
    stay, as kept/epoch-NNNN.safetensors in half precision, the first one before training (None: none); objective: what
    is made small (None: cross-entropy with the labels); train_last: the last K blocks and what comes after them alone
    (0: the head; None: everything); precision, compiling: see speed.choose; recompute: activations
    of the blocks in the backward pass, to spare memory; watchers: told every step and epoch in the first process, and
    closed at the end. Raises InputError when data, model, or the checkpoint do not fit together, NonFiniteError when
    the loss becomes NaN or infinite (the files keep the last good weights), StorageError when the disk is full (the
    previous checkpoint survives), RunError when another process has ended.
    """
    require_interval(keep_every)
    require_fitting(specimen, train, test)
    batch_size = min(recipe.batch_size, len(train))
    accelerator, processes = accelerated(torch.device(device))
    device = processes.device
    if batch_size < processes.count:
        raise InputError(f"expected --batch-size of at least {processes.count}, an image a process, found {batch_size}")
    steps = recipe.epochs * (len(train) // batch_size)
    speed = choose(device, precision=precision, compiling=compiling, steps=steps)
    task = Task(
        specimen, train, test, recipe, directory, seed, device, speed.precision, checkpoint_every, keep_every,
        objective or FromLabels(), train_last,
    )  # fmt: skip
    specimen.to(device)
    if specimen.anatomy.family == "cnn":  # the layout in which convolutions are fast; the values are the same
        specimen.model.to(memory_format=torch.channels_last)
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    looked, learning = watched(watchers if processes.is_first else ()), partly_trainable(specimen, last=train_last)
    with fork, learning, recomputing(specimen, on=recompute), attending(specimen, device), looked as told, decoding():
        training = _Training(task, accelerator, processes, speed, told, on_progress)
        training.begin(resume=resume)
        return training.run()


class _Training:
    """One run of the loop in one process."""

    def __init__(
        self,
        task: Task,
        accelerator: Accelerator,
        processes: Processes,
        speed: Speed,
        watchers: Sequence[Watcher],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.task, self.accelerator, self.processes, self.on_progress = task, accelerator, processes, on_progress
        self.speed, self.watchers = speed, watchers
        self.updates = Updates(task, accelerator, compiled=speed.compiled)
        # of this epoch, in this process: loss, right ones, images, and norms of gradients over the processes
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.standing = Standing()
        self.clock = Clock()
        self.reported = 0.0

    def begin(self, *, resume: bool) -> None:
        """Take up the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        with meeting():
            self.accelerator.wait_for_everyone()  # nobody writes before all have read
        if checkpoint is not None:
            self._take_up(checkpoint)
        if self.processes.is_first:
            rewrite_metrics(self.task.directory, self.standing.history)
            forget_after(self.task.directory, -1 if checkpoint is None else len(self.standing.history))
            if checkpoint is None:
                self._keep_weights(epochs=0)
        if checkpoint is None:
            self._write_checkpoint()

    def run(self) -> TrainingResult:
        """All epochs that are left."""
        while self.updates.step < self.task.steps:
            self._epoch()
        if self.updates.average is not None:
            copy_into(self.task.specimen.model, self.updates.average.tensors)
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
            notes=self.speed.notes,
        )

    def _take_up(self, checkpoint: Checkpoint) -> None:
        facts = checkpoint.facts
        require_same(facts["identity"], self.task.identity(), folder=self.task.directory)
        self.updates.take_up(checkpoint)
        if self.processes.is_first:  # the others' sums are in the first one's
            self.sums.copy_(checkpoint.tensors["sums"])
        self.standing = Standing.from_json(facts["standing"])
        self.clock = Clock(seconds=facts["seconds"])

    def _epoch(self) -> None:
        task, recipe, place = self.task, self.task.recipe, self.processes.index
        epoch, within = divmod(self.updates.step, task.steps_per_epoch)
        self.clock.begin_epoch()
        batches = epoch_batches(len(task.train), recipe.batch_size, seed=task.seed, epoch=epoch, views=recipe.views)[
            within:
        ]
        mine = [share(batch, place, self.processes.count) for batch in batches]
        source = task.source(epoch)
        for portion, batch in zip(portions(source, mine, pin=task.device.type == "cuda"), batches):
            self._step(portion, epoch, whole=len(batch))
            step = self.updates.step
            # the last step of an epoch writes its checkpoint after the look at the test images
            if task.checkpoint_every and step % task.checkpoint_every == 0 and step % task.steps_per_epoch:
                self._write_checkpoint()
        self._end_epoch(epoch)

    def _step(self, portion: Portion, epoch: int, *, whole: int) -> None:
        """Learn from a portion of a batch of `whole` images, and count."""
        labels = self.task.labels(portion.indices)
        learned = self.updates.apply(self.task.augmented(portion, epoch), labels, whole=whole)
        norm = learned.norm / self.processes.count  # all have the same
        self.sums += torch.tensor((learned.loss, learned.right, len(labels), norm), dtype=torch.float64)
        self.clock.count(whole)
        rate, loss = self.task.learning_rate(self.updates.step - 1), learned.loss / len(labels)
        facts = StepFacts(self.updates.step, epoch, loss, rate, learned.norm, self.clock.rate())
        with self.clock.stopped():
            for watcher in self.watchers:
                watcher.on_step(facts)
        self._report(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Look at the test images when it is time, and write everything down."""
        task = self.task
        self.updates.require_finite()
        loss, correct, images, norms = self.processes.total(self.sums).tolist()
        self.clock.pause()
        due = epoch + 1 == task.recipe.epochs or (epoch + 1) % task.recipe.evaluate_every == 0
        with self._kept_weights():
            test_loss, test_accuracy = self._look() if due else (None, None)
            metrics = EpochMetrics(
                epoch=epoch,
                step=self.updates.step,
                images=self.updates.step * task.batch_size,
                learning_rate=task.learning_rate(self.updates.step - 1),
                train_loss=loss / images,
                train_accuracy=correct / images,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                seconds=self.clock.seconds(),
                images_per_second=self.clock.epoch_rate(),
                gradient_norm=norms / task.steps_per_epoch,
            )
            self.standing = self.standing.after(metrics)
            if self.processes.is_first:
                append_metrics(task.directory, metrics)
                self._save_weights(best=self.standing.best_epoch == epoch)
                self._keep_weights(epochs=epoch + 1)
            for watcher in self.watchers:
                watcher.on_epoch(metrics, task.specimen)
        self._report(epoch, now=True)
        self.sums.zero_()
        self._write_checkpoint()

    def _look(self) -> tuple[float, float]:
        task = self.task
        return look(task.specimen, task.test, self.processes, precision=task.precision)

    def _kept_weights(self) -> AbstractContextManager[None]:
        """The weights that are tested and kept, in place of the trained ones for a while."""
        return nullcontext() if self.updates.average is None else self.updates.average.applied(self.task.specimen.model)

    def _save_weights(self, *, best: bool) -> None:
        for name in (zoo.WEIGHTS_FILE, BEST_FILE)[: 1 + best]:
            path = self.task.directory / name
            with told_as_storage(path):
                zoo.save(self.task.specimen, path)

    def _keep_weights(self, *, epochs: int) -> None:
        """A copy that stays, when it is time."""
        if self.task.keep_every and epochs % self.task.keep_every == 0:
            keep_weights(self.task.directory, self.task.specimen, epochs=epochs)

    def _write_checkpoint(self) -> None:
        sums = self.processes.total(self.sums)
        if not self.processes.is_first:
            return
        self.updates.require_finite()
        facts = {
            "identity": self.task.identity(),
            "step": self.updates.step,
            "seconds": self.clock.seconds(),
            "standing": asdict(self.standing),
        }
        write_checkpoint(self.task.directory, Checkpoint({**self.updates.tensors(), "sums": sums}, facts))

    def _report(self, epoch: int, *, now: bool = False) -> None:
        """Tell whoever listens, not more often than an eye can follow."""
        if self.on_progress is None or not self.processes.is_first:
            return
        if not now and time.perf_counter() - self.reported < _PROGRESS_INTERVAL:
            return
        self.reported = time.perf_counter()
        loss, correct, images, _ = self.sums.tolist()
        looks = [metrics.test_accuracy for metrics in self.standing.history if metrics.test_accuracy is not None]
        self.on_progress(
            Progress(
                epoch=epoch,
                epochs=self.task.recipe.epochs,
                step=self.updates.step,
                steps=self.task.steps,
                loss=loss / images,
                accuracy=correct / images,
                test_accuracy=looks[-1] if looks else None,
                images_per_second=self.clock.rate(),
                seconds_left=self.clock.seconds_left((self.task.steps - self.updates.step) * self.task.batch_size),
            )
        )
