"""The loop over cached features: epochs of steps on a head alone, a look at the test images, a checkpoint now and then.

Orders, steps and looks are those of `loop`; what differs is that an epoch takes less time than writing a file, so
checkpoints go by the clock, and the whole model is written once, at the end.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.devices import autocast
from vitlens.models import zoo
from vitlens.models.specimen import Specimen
from vitlens.processes import Processes
from vitlens.training.average import copy_into
from vitlens.training.checkpoint import Checkpoint, read_checkpoint, require_same, told_as_storage, write_checkpoint
from vitlens.training.clock import Clock
from vitlens.training.feed import epoch_batches, share
from vitlens.training.frozen import Cached, CachedTest
from vitlens.training.loop import BEST_FILE
from vitlens.training.metrics import EpochMetrics, Progress, Standing, TrainingResult, append_metrics, rewrite_metrics
from vitlens.training.task import Task
from vitlens.training.update import Updates
from vitlens.training.watch import StepFacts, Watcher

CHECKPOINT_INTERVAL = 5.0  # seconds
_PROGRESS_INTERVAL = 0.1  # seconds


class HeadTraining:
    """One run of the loop over features in one process.

    specimen: the whole one; task: of its head alone (see head_alone); train (views, images, heads, dim) and test (1,
    images, heads, dim): what the head reads of each image; clock: runs since before they were computed; told,
    on_progress: who listens.
    """

    def __init__(
        self,
        specimen: Specimen,
        task: Task,
        updates: Updates,
        processes: Processes,
        clock: Clock,
        train: Cached,
        test: CachedTest,
    ) -> None:
        self.specimen, self.task, self.updates, self.processes, self.clock = specimen, task, updates, processes, clock
        self.told: Sequence[Watcher] = ()
        self.on_progress: Callable[[Progress], None] | None = None
        self.train, self.test = train.to(task.device), test[0].to(task.device)
        self.standing = Standing()
        self.best: dict[str, Tensor] = {}
        self.written = self.reported = 0.0

    def begin(self, *, resume: bool) -> None:
        """Take up the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        self.processes.total(torch.zeros(1))  # nobody writes before all have read
        if checkpoint is not None:
            require_same(checkpoint.facts["identity"], self.task.identity(), folder=self.task.directory)
            self.updates.take_up(checkpoint)
            self.standing = Standing.from_json(checkpoint.facts["standing"])
            self.clock = Clock(seconds=checkpoint.facts["seconds"] + self.clock.seconds())
            self.best = {
                name.removeprefix("best/"): value.to(self.task.device)
                for name, value in checkpoint.tensors.items()
                if name.startswith("best/")
            }
        if self.processes.is_first:
            rewrite_metrics(self.task.directory, self.standing.history)
        self._write_checkpoint()

    def run(self, *, notes: tuple[str, ...]) -> TrainingResult:
        """All epochs that are left; then the whole specimen is written with the best and with the last head."""
        while self.updates.step < self.task.steps:
            self._epoch()
        self._write_checkpoint()
        head, directory, standing = self.task.specimen.model, self.task.directory, self.standing
        last = self.updates.average.tensors if self.updates.average is not None else head.state_dict()
        last = {name: value.clone() for name, value in last.items()}
        for name, tensors in ((BEST_FILE, self.best or last), (zoo.WEIGHTS_FILE, last)):  # it ends with the last ones
            copy_into(head, tensors)
            if self.processes.is_first:
                with told_as_storage(directory / name):
                    zoo.save(self.specimen, directory / name)
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
            notes=notes,
        )

    def _epoch(self) -> None:
        task, place = self.task, self.processes.index
        epoch = self.updates.step // task.steps_per_epoch
        self.clock.begin_epoch()
        features = self.train[epoch % len(self.train)]
        sums = torch.zeros(4, dtype=torch.float64)  # loss, right ones, images, norms of gradients over the processes
        for batch in epoch_batches(len(task.train), task.recipe.batch_size, seed=task.seed, epoch=epoch):
            mine = share(batch, place, self.processes.count).to(task.device)
            learned = self.updates.apply(features[mine], task.labels(mine), whole=len(batch))
            norm = learned.norm / self.processes.count  # all have the same
            sums += torch.tensor((learned.loss, learned.right, len(mine), norm), dtype=torch.float64)
            self.clock.count(len(batch))
            for watcher in self.told:
                step = self.updates.step
                rate, loss = task.learning_rate(step - 1), learned.loss / max(len(mine), 1)
                watcher.on_step(StepFacts(step, epoch, loss, rate, learned.norm, self.clock.rate()))
        self._end_epoch(epoch, *self.processes.total(sums).tolist())

    def _end_epoch(self, epoch: int, loss: float, correct: float, images: float, norms: float) -> None:
        """Look at the test images when it is time, and write down what was seen."""
        task, step = self.task, self.updates.step
        self.clock.pause()
        due = epoch + 1 == task.recipe.epochs or (epoch + 1) % task.recipe.evaluate_every == 0
        with self._kept_weights():
            test_loss, test_accuracy = self._look() if due else (None, None)
            metrics = EpochMetrics(
                epoch=epoch,
                step=step,
                images=step * task.batch_size,
                learning_rate=task.learning_rate(step - 1),
                train_loss=loss / images,
                train_accuracy=correct / images,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                seconds=self.clock.seconds(),
                images_per_second=self.clock.epoch_rate(),
                gradient_norm=norms / task.steps_per_epoch,
            )
            self.standing = self.standing.after(metrics)
            if self.standing.best_epoch == epoch:
                self.best = {name: value.clone() for name, value in task.specimen.model.state_dict().items()}
            for watcher in self.told:
                watcher.on_epoch(metrics, self.specimen)
        if self.processes.is_first:
            append_metrics(task.directory, metrics)
        if time.perf_counter() - self.written > CHECKPOINT_INTERVAL:
            self._write_checkpoint()
        self._report(metrics)

    @torch.inference_mode()
    def _look(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images; every process looks at all of them."""
        labels = self.task.test.labels
        assert labels is not None
        with autocast(self.task.device, self.task.precision):
            logits = self.task.specimen.model(self.test).float().cpu()
        labels = labels.cpu().long()
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()

    def _kept_weights(self) -> AbstractContextManager[None]:
        """The weights that are tested and kept, in place of the trained ones for a while."""
        average = self.updates.average
        return nullcontext() if average is None else average.applied(self.task.specimen.model)

    def _write_checkpoint(self) -> None:
        self.written = time.perf_counter()
        if not self.processes.is_first:
            return
        self.updates.require_finite()
        facts = {
            "identity": self.task.identity(),
            "step": self.updates.step,
            "seconds": self.clock.seconds(),
            "standing": asdict(self.standing),
        }
        best = {f"best/{name}": value for name, value in self.best.items()}
        write_checkpoint(self.task.directory, Checkpoint({**self.updates.tensors(), **best}, facts))

    def _report(self, metrics: EpochMetrics) -> None:
        """Tell whoever listens, not more often than an eye can follow."""
        last = self.updates.step == self.task.steps
        if self.on_progress is None or not self.processes.is_first:
            return
        if not last and time.perf_counter() - self.reported < _PROGRESS_INTERVAL:
            return
        self.reported = time.perf_counter()
        looks = [seen.test_accuracy for seen in self.standing.history if seen.test_accuracy is not None]
        left = (self.task.steps - self.updates.step) * self.task.batch_size
        self.on_progress(
            Progress(
                epoch=metrics.epoch,
                epochs=self.task.recipe.epochs,
                step=metrics.step,
                steps=self.task.steps,
                loss=metrics.train_loss,
                accuracy=metrics.train_accuracy,
                test_accuracy=looks[-1] if looks else None,
                images_per_second=self.clock.rate(),
                seconds_left=self.clock.seconds_left(left),
            )
        )
