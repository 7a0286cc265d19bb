"""The loop: epochs of steps, a look at the test images, a checkpoint, until the recipe is through.

The result depends on (model, data, recipe, seed, number of processes) alone. Orders, augmentation and dropout are
derived from (seed, epoch, step), so a run that was killed goes on from its checkpoint as if nothing had happened.
Several processes take shares of the same global batches; their averaged gradients are those of one process, except for
batch normalisation, whose statistics are per process (a CNN then sees smaller batches), and dropout, drawn per process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

from vitlens.data.split import Split, takes_splits
from vitlens.errors import InputError
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.processes import Processes, accelerated, meeting
from vitlens.training.account import BEST_FILE, Account
from vitlens.training.average import copy_into
from vitlens.training.checkpoint import Checkpoint, read_checkpoint, told_as_storage, write_checkpoint
from vitlens.training.clock import Clock
from vitlens.training.feed import Portion, decoding, epoch_batches, portions, share
from vitlens.training.finetune import partly_trainable
from vitlens.training.kept import forget_after, keep_weights, require_interval
from vitlens.training.metrics import Progress, TrainingResult, append_metrics, rewrite_metrics
from vitlens.training.objective import FromLabels, Objective
from vitlens.training.recipe import Recipe
from vitlens.training.speed import Speed, attending, choose, recomputing
from vitlens.training.task import Task, require_fitting
from vitlens.training.update import Updates
from vitlens.training.validation import look
from vitlens.training.watch import StepFacts, Watcher, watched


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
    """Train a model, which ends with the last weights (averaged ones where the recipe averages).

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
    require_fitting(model, train, test)
    batch_size = min(recipe.batch_size, len(train))
    accelerator, processes = accelerated(torch.device(device))
    device = processes.device
    if batch_size < processes.count:
        raise InputError(f"expected --batch-size of at least {processes.count}, an image a process, found {batch_size}")
    steps = recipe.epochs * (len(train) // batch_size)
    speed = choose(device, precision=precision, compiling=compiling, steps=steps)
    task = Task(
        model, train, test, recipe, directory, seed, device, speed.precision, checkpoint_every, keep_every,
        objective or FromLabels(), train_last,
    )  # fmt: skip
    model.to(device)
    if model.anatomy.family == "cnn":  # the layout in which convolutions are fast; the values are the same
        model.module.to(memory_format=torch.channels_last)
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    looked, learning = watched(watchers if processes.is_first else ()), partly_trainable(model, last=train_last)
    with fork, learning, recomputing(model, on=recompute), attending(model, device), looked as told, decoding():
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
        self.task, self.accelerator, self.processes = task, accelerator, processes
        self.speed, self.watchers = speed, watchers
        self.updates = Updates(task, accelerator, compiled=speed.compiled)
        # of this epoch, in this process: loss, right ones, images, and norms of gradients over the processes
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.account = Account(task, processes, Clock(), on_progress)

    def begin(self, *, resume: bool) -> None:
        """Take up the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        with meeting():
            self.accelerator.wait_for_everyone()  # nobody writes before all have read
        if checkpoint is not None:
            self._take_up(checkpoint)
        if self.processes.is_first:
            rewrite_metrics(self.task.directory, self.account.standing.history)
            forget_after(self.task.directory, -1 if checkpoint is None else len(self.account.standing.history))
            if checkpoint is None:
                self._keep_weights(epochs=0)
        if checkpoint is None:
            self._write_checkpoint()

    def run(self) -> TrainingResult:
        """All epochs that are left."""
        while self.updates.step < self.task.steps:
            self._epoch()
        if self.updates.average is not None:
            copy_into(self.task.model.module, self.updates.average.tensors)
        return self.account.result(self.speed.notes)

    def _take_up(self, checkpoint: Checkpoint) -> None:
        self.account.take_up(checkpoint)
        self.updates.take_up(checkpoint)
        if self.processes.is_first:  # the others' sums are in the first one's
            sums = checkpoint.tensors.get("sums")
            if sums is None or sums.shape != self.sums.shape or not sums.isfinite().all():
                raise InputError(
                    f"expected the sums of an epoch in the checkpoint of {self.task.directory}, found none; "
                    "train anew in another folder"
                )
            self.sums.copy_(sums)

    def _epoch(self) -> None:
        task, recipe, place = self.task, self.task.recipe, self.processes.index
        epoch, within = divmod(self.updates.step, task.steps_per_epoch)
        self.account.clock.begin_epoch()
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
        clock = self.account.clock
        clock.count(whole)
        rate, loss = self.task.learning_rate(self.updates.step - 1), learned.loss / len(labels)
        facts = StepFacts(self.updates.step, epoch, loss, rate, learned.norm, clock.rate())
        with clock.stopped():
            for watcher in self.watchers:
                watcher.on_step(facts)
        self._report(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Look at the test images when it is time, and write everything down."""
        task = self.task
        self.updates.require_finite()
        sums = self.processes.total(self.sums).tolist()
        self.account.clock.pause()
        with self.updates.averaged():
            looked = self._look() if self.account.is_due(epoch) else (None, None)
            metrics = self.account.close(epoch, self.updates.step, sums, looked)
            if self.processes.is_first:
                append_metrics(task.directory, metrics)
                self._save_weights(best=self.account.standing.best_epoch == epoch)
                self._keep_weights(epochs=epoch + 1)
            for watcher in self.watchers:
                watcher.on_epoch(metrics, task.model)
        self._report(epoch, now=True)
        self.sums.zero_()
        self._write_checkpoint()

    def _look(self) -> tuple[float, float]:
        task = self.task
        return look(task.model, task.test, self.processes, precision=task.precision)

    def _save_weights(self, *, best: bool) -> None:
        for name in (saved.WEIGHTS_FILE, BEST_FILE)[: 1 + best]:
            path = self.task.directory / name
            with told_as_storage(path):
                saved.save(self.task.model, path)

    def _keep_weights(self, *, epochs: int) -> None:
        """A copy that stays, when it is time."""
        if self.task.keep_every and epochs % self.task.keep_every == 0:
            keep_weights(self.task.directory, self.task.model, epochs=epochs)

    def _write_checkpoint(self) -> None:
        sums = self.processes.total(self.sums)
        if not self.processes.is_first:
            return
        self.updates.require_finite()
        tensors = {**self.updates.tensors(), "sums": sums}
        write_checkpoint(self.task.directory, Checkpoint(tensors, self.account.facts(self.updates.step)))

    def _report(self, epoch: int, *, now: bool = False) -> None:
        loss, correct, images, _ = self.sums.tolist()
        images = max(images, 1)  # a process may have had none yet
        self.account.tell(epoch, self.updates.step, loss / images, correct / images, now=now)
