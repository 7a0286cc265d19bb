"""The training loop: epochs of steps, each followed by a test and a checkpoint.

The result depends only on (model, data, recipe, seed, number of processes). Orders, augmentation and dropout derive
from (seed, epoch, step), so a killed run resumes exactly from its checkpoint.
Several processes take shares of the same global batches; their averaged gradients equal those of one process, except
for batch normalisation, whose statistics are per process (over smaller batches), and dropout, drawn per process.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.data.split import Split, takes_splits
from vitlens.errors import InputError
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.models.weights import require_fitting as require_fitting_weights
from vitlens.processes import Processes, accelerated, peer_errors
from vitlens.training.bookkeeping import BEST_FILE, Bookkeeping, Clock
from vitlens.training.checkpoint import (
    Checkpoint,
    delete_kept_after,
    keep_weights,
    read_checkpoint,
    require_interval,
    storage_errors,
    write_checkpoint,
)
from vitlens.training.feed import decoding_errors, epoch_batches, portions, process_share
from vitlens.training.finetune import partly_trainable
from vitlens.training.metrics import (
    Progress,
    StepMetrics,
    TrainingResult,
    Watcher,
    append_metrics,
    rewrite_metrics,
    watched,
)
from vitlens.training.optimiser import copy_into
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose, fast_attention, gradient_checkpointing
from vitlens.training.task import LabelObjective, Objective, Task, require_fitting
from vitlens.training.update import Updates

CHECKPOINT_INTERVAL = 5.0  # seconds, between the checkpoints of a training on features, whose epochs are short


@takes_splits
def fit(
    model: Model,
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
    """Train a model; afterwards it has the last weights (averaged ones where the recipe averages).

    directory: gets metrics.jsonl, model.safetensors (those weights), best.safetensors and checkpoint/, each written
    atomically; resume: continue from its checkpoint, or start where there is none; checkpoint_every: steps between
    checkpoints within an epoch (None: one at each epoch's end); keep_every: epochs between kept copies of the
    weights, kept/epoch-NNNN.safetensors in half precision, the first one before training (None: none); objective: the
    loss (None: cross-entropy with the labels); train_last: train only the last K blocks and the layers after them
    (0: the head; None: everything); precision, compiling: see speed.choose; recompute: the blocks' activations in the
    backward pass, to save memory; watchers: called at every step and epoch in the first process, and closed at the
    end. Raises InputError when data, model and checkpoint do not match, NonFiniteError when the loss becomes NaN or
    infinite (the files keep the last good weights), StorageError when the disk is full (the previous checkpoint
    survives), RunError when another process has ended.
    """
    require_interval(keep_every)
    require_fitting(model, train, test)
    batch_size = min(recipe.batch_size, len(train))
    accelerator, processes = accelerated(torch.device(device))
    device = processes.device
    if batch_size < processes.count:
        raise InputError(f"expected --batch-size of at least {processes.count}, one per process, found {batch_size}")
    steps = recipe.epochs * (len(train) // batch_size)
    speed = choose(device, precision=precision, compiling=compiling, steps=steps)
    task = Task(
        model, train, test, recipe, directory, seed, device, speed.precision, checkpoint_every, keep_every,
        objective or LabelObjective(), train_last,
    )  # fmt: skip
    model.to(device)
    if model.anatomy.family == "cnn":  # the memory layout in which convolutions are fast
        model.module.to(memory_format=torch.channels_last)
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    watching, training_part = watched(watchers if processes.is_first else ()), partly_trainable(model, last=train_last)
    computing, attention = gradient_checkpointing(model, on=recompute), fast_attention(model, device)
    with fork, training_part, computing, attention, watching as active, decoding_errors():
        updates = Updates(task, accelerator, compiled=speed.compiled)
        books = Bookkeeping(task, processes, Clock(), on_progress)
        return Training(updates, books, _Images(task, processes), active).run(resume=resume, notes=speed.notes)


class Examples(Protocol):
    """What a training runs on: the inputs of its model for the training and the test images."""

    def batches(self, epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and labels of this process's share of each batch, given by its keys, on the device."""
        ...

    def test(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images, over all processes."""
        ...


class _Images:
    """The images of a task, augmented by its recipe."""

    def __init__(self, task: Task, processes: Processes) -> None:
        self.task, self.processes = task, processes

    def batches(self, epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The augmented images and their labels."""
        for portion in portions(self.task.source(epoch), shares, pin=self.task.device.type == "cuda"):
            yield self.task.augmented(portion, epoch), self.task.labels(portion.indices)

    def test(self) -> tuple[float, float]:
        """Loss and accuracy; each process takes its share. Raises NonFiniteError for a logit that is not finite."""
        model, split, processes = self.task.model, self.task.test, self.processes
        _broadcast_buffers(model, processes)
        indices = process_share(torch.arange(len(split)), processes.index, processes.count)
        sums = torch.zeros(2, dtype=torch.float64)
        if len(indices):  # with fewer images than processes, some have none
            part = split.pick(indices)
            assert part.labels is not None
            logits, labels = predicted_logits(model, part, precision=self.task.precision), part.labels.cpu().long()
            sums[0] = F.cross_entropy(logits, labels, reduction="sum")
            sums[1] = (logits.argmax(1) == labels).sum()
        loss, accuracy = (processes.total(sums) / len(split)).tolist()
        return loss, accuracy


class Training:
    """One run of the loop in one process.

    whole: the model that the task's model is the head of, where that alone is trained. As such an epoch takes less
    time than writing a file, checkpoints are then written at intervals of time, and the weights once, at the end.
    """

    def __init__(
        self,
        updates: Updates,
        books: Bookkeeping,
        examples: Examples,
        watchers: Sequence[Watcher],
        *,
        whole: Model | None = None,
    ) -> None:
        self.updates, self.books, self.examples, self.watchers = updates, books, examples, watchers
        self.task, self.processes, self.whole = updates.task, books.processes, whole
        # of this epoch, in this process: loss, correct predictions, images, gradient norms / processes
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.best: dict[str, Tensor] = {}  # weights of a head
        self.last_checkpoint = 0.0

    def run(self, *, resume: bool, notes: tuple[str, ...]) -> TrainingResult:
        """All epochs that remain. notes: how it is computed, in words."""
        self._begin(resume=resume)
        while self.updates.step < self.task.steps:
            self._epoch()
        if self.updates.average is not None:
            copy_into(self.task.model.module, self.updates.average.tensors)
        if self.whole is not None:
            self._write_whole(self.whole)
        return self.books.result(notes)

    def _begin(self, *, resume: bool) -> None:
        """Continue from the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        with peer_errors():
            self.updates.accelerator.wait_for_everyone()  # no process writes before all have read
        if checkpoint is not None:
            self._resume(checkpoint)
        if self.processes.is_first:
            rewrite_metrics(self.task.directory, self.books.standing.history)
            delete_kept_after(self.task.directory, -1 if checkpoint is None else len(self.books.standing.history))
            if checkpoint is None:
                self._keep_weights(epochs=0)
        if checkpoint is None:
            self._write_checkpoint()

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.books.resume(checkpoint)
        self.updates.resume(checkpoint)
        self.best = {
            name.removeprefix("best/"): value.to(self.task.device)
            for name, value in checkpoint.tensors.items()
            if name.startswith("best/")
        }
        if self.best:
            require_fitting_weights(self.task.model.module, self.best, where="the checkpoint's best head")
        if self.processes.is_first:  # its sums include those of the others
            sums = checkpoint.tensors.get("sums")
            if sums is None or sums.shape != self.sums.shape or not sums.isfinite().all():
                raise InputError(
                    f"expected the sums of an epoch in the checkpoint of {self.task.directory}, found none; "
                    "train anew in another folder"
                )
            self.sums.copy_(sums)

    def _epoch(self) -> None:
        task, recipe, process = self.task, self.task.recipe, self.processes.index
        epoch, within = divmod(self.updates.step, task.steps_per_epoch)
        self.books.clock.begin_epoch()
        batches = epoch_batches(len(task.train), recipe.batch_size, seed=task.seed, epoch=epoch, views=recipe.views)[
            within:
        ]
        shares = [process_share(batch, process, self.processes.count) for batch in batches]
        for (inputs, labels), batch in zip(self.examples.batches(epoch, shares), batches):
            self._step(inputs, labels, epoch, count=len(batch))
            step = self.updates.step
            # the last step of an epoch writes its checkpoint after the test
            if task.checkpoint_every and step % task.checkpoint_every == 0 and step % task.steps_per_epoch:
                self._write_checkpoint()
        self._end_epoch(epoch)

    def _step(self, inputs: Tensor, labels: Tensor, epoch: int, *, count: int) -> None:
        """Update the weights from this process's share of a batch of `count` images, and add it to the sums."""
        update = self.updates.apply(inputs, labels, whole=count)
        norm = update.norm / self.processes.count  # the same in all of them
        self.sums += torch.tensor((update.loss, update.correct, len(labels), norm), dtype=torch.float64)
        clock = self.books.clock
        clock.count(count)
        rate, loss = self.task.learning_rate(self.updates.step - 1), update.loss / max(len(labels), 1)
        facts = StepMetrics(self.updates.step, epoch, loss, rate, update.norm, clock.rate())
        with clock.stopped():
            for watcher in self.watchers:
                watcher.on_step(facts)
        self._report(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Test if due, and record the epoch."""
        task = self.task
        self.updates.require_finite()
        sums = self.processes.total(self.sums).tolist()
        self.books.clock.pause()
        with self.updates.averaged():
            tested = self.examples.test() if self.books.is_due(epoch) else (None, None)
            metrics = self.books.end_epoch(epoch, self.updates.step, sums, tested)
            if self.processes.is_first:
                append_metrics(task.directory, metrics)
                self._keep_weights(epochs=epoch + 1)
            self._save_weights(best=self.books.standing.best_epoch == epoch)
            for watcher in self.watchers:
                watcher.on_epoch(metrics, self.whole or task.model)
        self._report(epoch, now=True)
        self.sums.zero_()
        recent = time.perf_counter() - self.last_checkpoint < CHECKPOINT_INTERVAL
        if self.whole is None or not recent or self.updates.step == task.steps:
            self._write_checkpoint()

    def _save_weights(self, *, best: bool) -> None:
        """Write the weights of this epoch; of a head, note them where they are the best."""
        if self.whole is not None:
            if best:
                self.best = {name: value.clone() for name, value in self.task.model.module.state_dict().items()}
        elif self.processes.is_first:
            for name in (saved.WEIGHTS_FILE, BEST_FILE)[: 1 + best]:
                _save(self.task.model, self.task.directory / name)

    def _write_whole(self, model: Model) -> None:
        """Write the model with the best head, and with the last one, which it keeps."""
        head = self.task.model.module
        last = {name: value.clone() for name, value in head.state_dict().items()}
        for name, tensors in ((BEST_FILE, self.best or last), (saved.WEIGHTS_FILE, last)):
            copy_into(head, tensors)
            if self.processes.is_first:
                _save(model, self.task.directory / name)

    def _keep_weights(self, *, epochs: int) -> None:
        """Keep a copy of the weights, if due."""
        if self.task.keep_every and epochs % self.task.keep_every == 0:
            keep_weights(self.task.directory, self.task.model, epochs=epochs)

    def _write_checkpoint(self) -> None:
        self.last_checkpoint = time.perf_counter()
        sums = self.processes.total(self.sums)
        if not self.processes.is_first:
            return
        self.updates.require_finite()
        best = {f"best/{name}": value for name, value in self.best.items()}
        tensors = {**self.updates.tensors(), **best, "sums": sums}
        write_checkpoint(self.task.directory, Checkpoint(tensors, self.books.facts(self.updates.step)))

    def _report(self, epoch: int, *, now: bool = False) -> None:
        loss, correct, images, _ = self.sums.tolist()
        images = max(images, 1)  # a process may have no images yet
        self.books.report(epoch, self.updates.step, loss / images, correct / images, now=now)


def _save(model: Model, path: Path) -> None:
    with storage_errors(path):
        saved.save(model, path)


def _broadcast_buffers(module: nn.Module, processes: Processes) -> None:
    """Give every process the buffers of the first: batch statistics differ between processes in training."""
    if processes.count > 1:
        for buffer in module.buffers():
            with peer_errors():
                broadcast(buffer, from_process=0)
