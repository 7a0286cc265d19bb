"""The loop over cached features: epochs of steps on a head alone, a look at the test images, a checkpoint now and then.

Orders, steps and looks are those of `loop`; what differs is that an epoch takes less time than writing a file, so
checkpoints go by the clock, and the whole model is written once, at the end.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.devices import autocast
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.models.weights import require_fitting
from vitlens.processes import Processes
from vitlens.training.account import BEST_FILE, Account
from vitlens.training.average import copy_into
from vitlens.training.checkpoint import Checkpoint, read_checkpoint, told_as_storage, write_checkpoint
from vitlens.training.clock import Clock
from vitlens.training.feed import epoch_batches, share
from vitlens.training.frozen import Cached, CachedTest
from vitlens.training.metrics import Progress, TrainingResult, append_metrics, rewrite_metrics
from vitlens.training.task import Task
from vitlens.training.update import Updates
from vitlens.training.watch import StepFacts, Watcher

CHECKPOINT_INTERVAL = 5.0  # seconds


class HeadTraining:
    """One run of the loop over features in one process.

    model: the whole one; task: of its head alone (see head_alone); train (views, images, heads, dim) and test (1,
    images, heads, dim): what the head reads of each image; clock: runs since before they were computed; watchers,
    on_progress: who listens.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        updates: Updates,
        processes: Processes,
        clock: Clock,
        train: Cached,
        test: CachedTest,
        *,
        watchers: Sequence[Watcher],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.model, self.task, self.updates, self.processes = model, task, updates, processes
        self.watchers = watchers
        self.train, self.test = train.to(task.device), test[0].to(task.device)
        self.account = Account(task, processes, clock, on_progress)
        self.best: dict[str, Tensor] = {}
        self.written = 0.0

    def begin(self, *, resume: bool) -> None:
        """Take up the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        self.processes.total(torch.zeros(1))  # nobody writes before all have read
        if checkpoint is not None:
            self.account.take_up(checkpoint)
            self.updates.take_up(checkpoint)
            self.best = {
                name.removeprefix("best/"): value.to(self.task.device)
                for name, value in checkpoint.tensors.items()
                if name.startswith("best/")
            }
            if self.best:
                require_fitting(self.task.model.module, self.best, where="the checkpoint's best head")
        if self.processes.is_first:
            rewrite_metrics(self.task.directory, self.account.standing.history)
        self._write_checkpoint()

    def run(self, *, notes: tuple[str, ...]) -> TrainingResult:
        """All epochs that are left; then the whole model is written with the best and with the last head."""
        while self.updates.step < self.task.steps:
            self._epoch()
        self._write_checkpoint()
        head, directory = self.task.model.module, self.task.directory
        last = self.updates.average.tensors if self.updates.average is not None else head.state_dict()
        last = {name: value.clone() for name, value in last.items()}
        for name, tensors in ((BEST_FILE, self.best or last), (saved.WEIGHTS_FILE, last)):  # it ends with the last ones
            copy_into(head, tensors)
            if self.processes.is_first:
                with told_as_storage(directory / name):
                    saved.save(self.model, directory / name)
        return self.account.result(notes)

    def _epoch(self) -> None:
        task, place, clock = self.task, self.processes.index, self.account.clock
        epoch = self.updates.step // task.steps_per_epoch
        clock.begin_epoch()
        features = self.train[epoch % len(self.train)]
        sums = torch.zeros(4, dtype=torch.float64)  # loss, right ones, images, norms of gradients over the processes
        for batch in epoch_batches(len(task.train), task.recipe.batch_size, seed=task.seed, epoch=epoch):
            mine = share(batch, place, self.processes.count).to(task.device)
            learned = self.updates.apply(features[mine], task.labels(mine), whole=len(batch))
            norm = learned.norm / self.processes.count  # all have the same
            sums += torch.tensor((learned.loss, learned.right, len(mine), norm), dtype=torch.float64)
            clock.count(len(batch))
            for watcher in self.watchers:
                step = self.updates.step
                rate, loss = task.learning_rate(step - 1), learned.loss / max(len(mine), 1)
                watcher.on_step(StepFacts(step, epoch, loss, rate, learned.norm, clock.rate()))
        self._end_epoch(epoch, self.processes.total(sums).tolist())

    def _end_epoch(self, epoch: int, sums: list[float]) -> None:
        """Look at the test images when it is time, and write down what was seen."""
        task, account = self.task, self.account
        account.clock.pause()
        with self.updates.averaged():
            looked = self._look() if account.is_due(epoch) else (None, None)
            metrics = account.close(epoch, self.updates.step, sums, looked)
            if account.standing.best_epoch == epoch:
                self.best = {name: value.clone() for name, value in task.model.module.state_dict().items()}
            for watcher in self.watchers:
                watcher.on_epoch(metrics, self.model)
        if self.processes.is_first:
            append_metrics(task.directory, metrics)
        if time.perf_counter() - self.written > CHECKPOINT_INTERVAL:
            self._write_checkpoint()
        last = self.updates.step == task.steps
        account.tell(epoch, metrics.step, metrics.train_loss, metrics.train_accuracy, now=last)

    @torch.inference_mode()
    def _look(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images; every process looks at all of them."""
        labels = self.task.test.labels
        assert labels is not None
        with autocast(self.task.device, self.task.precision):
            logits = self.task.model.module(self.test).float().cpu()
        labels = labels.cpu().long()
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()

    def _write_checkpoint(self) -> None:
        self.written = time.perf_counter()
        if not self.processes.is_first:
            return
        self.updates.require_finite()
        best = {f"best/{name}": value for name, value in self.best.items()}
        facts = self.account.facts(self.updates.step)
        write_checkpoint(self.task.directory, Checkpoint({**self.updates.tensors(), **best}, facts))
