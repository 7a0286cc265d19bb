"""The bookkeeping of a training on images or cached features: time, epochs, progress, checkpoint, result."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from vitlens.errors import InputError
from vitlens.models import saved
from vitlens.processes import Processes
from vitlens.training.checkpoint import Checkpoint, require_same
from vitlens.training.metrics import EpochHistory, EpochMetrics, Progress, TrainingResult
from vitlens.training.task import Task
from vitlens.typed import Count, between, read_as

BEST_FILE = "best.safetensors"
PROGRESS_INTERVAL = 0.1  # seconds


class Clock:
    """The time and throughput of a training, from the creation of the clock; tests do not count as training.

    seconds: spent by earlier runs of the same training.
    """

    def __init__(self, *, seconds: float = 0.0) -> None:
        self._earlier = seconds
        self._began = time.perf_counter()
        self._paused = 0.0
        self._pause_began: float | None = None
        self._images = 0
        self._epoch = (0.0, 0)  # training seconds and images at its start

    def count(self, images: int) -> None:
        """Count images that were trained on."""
        self._images += images

    def pause(self) -> None:
        """Start a pause, which the next epoch ends."""
        self._pause_began = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A pause within an epoch, for as long as the context lasts."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def begin_epoch(self) -> None:
        """End a pause, and measure the epoch's throughput from here."""
        if self._pause_began is not None:
            self._paused += time.perf_counter() - self._pause_began
            self._pause_began = None
        self._epoch = (self._training(), self._images)

    def seconds(self) -> float:
        """Total time of all runs of this training, including tests."""
        return self._earlier + time.perf_counter() - self._began

    def epoch_rate(self) -> float:
        """Images per second in this epoch."""
        return (self._images - self._epoch[1]) / max(self._training() - self._epoch[0], 1e-9)

    def rate(self) -> float:
        """Images per second since this run began."""
        return self._images / max(self._training(), 1e-9)

    def seconds_left(self, images: int) -> float:
        """Estimated time for this number of further images, at the throughput so far, pauses included."""
        return images * (time.perf_counter() - self._began) / max(self._images, 1)

    def _training(self) -> float:
        now = time.perf_counter() if self._pause_began is None else self._pause_began
        return now - self._began - self._paused


@dataclass(frozen=True)
class CheckpointFacts:
    """The part of a checkpoint that is not tensors: the run's identity, steps, seconds and history."""

    identity: Mapping[str, Any]
    step: Count
    seconds: Annotated[float, between(0, 1e10)]
    standing: EpochHistory


class Bookkeeping:
    """The epochs, times and progress of a run: its state apart from tensors.

    clock: started when the run began; on_progress: called in the first process.
    """

    def __init__(
        self, task: Task, processes: Processes, clock: Clock, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.task, self.processes, self.clock = task, processes, clock
        self.standing = EpochHistory()
        self._listener = on_progress if processes.is_first else None
        self._reported = 0.0  # seconds, of the last report

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises InputError when it belongs to another run."""
        source = f"the checkpoint in {self.task.directory}"
        facts = read_as(CheckpointFacts, dict(checkpoint.facts), source=source, hint="train anew in another folder")
        require_same(facts.identity, self.task.identity(), folder=self.task.directory)
        done, history = facts.step // self.task.steps_per_epoch, facts.standing.history
        tested = not history or facts.step < self.task.steps or history[-1].test_accuracy is not None
        if facts.step > self.task.steps or len(history) != done or not tested:
            raise InputError(
                f"expected {source} to hold {done} epochs, at most {self.task.recipe.epochs}, found {len(history)}; "
                "train anew in another folder"
            )
        self.standing = facts.standing
        self.clock = Clock(seconds=facts.seconds + self.clock.seconds())

    def facts(self, step: int) -> dict[str, Any]:
        """The part of a checkpoint that is not tensors."""
        return {
            "identity": self.task.identity(),
            "step": step,
            "seconds": self.clock.seconds(),
            "standing": asdict(self.standing),
        }

    def is_due(self, epoch: int) -> bool:
        """Whether the model is tested after this epoch; always after the last one."""
        recipe = self.task.recipe
        return epoch + 1 == recipe.epochs or (epoch + 1) % recipe.evaluate_every == 0

    def end_epoch(
        self, epoch: int, step: int, sums: Sequence[float], tested: tuple[float, float] | tuple[None, None]
    ) -> EpochMetrics:
        """Record an epoch.

        sums: over its images and processes: loss, correct predictions, images, gradient norms; tested: loss and
        accuracy on the test images.
        """
        task, (loss, correct, images, norms) = self.task, sums
        metrics = EpochMetrics(
            epoch=epoch,
            step=step,
            images=step * task.batch_size,
            learning_rate=task.learning_rate(step - 1),
            train_loss=loss / images,
            train_accuracy=correct / images,
            test_loss=tested[0],
            test_accuracy=tested[1],
            seconds=self.clock.seconds(),
            images_per_second=self.clock.epoch_rate(),
            gradient_norm=norms / task.steps_per_epoch,
        )
        self.standing = self.standing.after(metrics)
        return metrics

    def report(self, epoch: int, step: int, loss: float, accuracy: float, *, now: bool = False) -> None:
        """Call on_progress, now or when PROGRESS_INTERVAL has passed. loss, accuracy: means of this epoch."""
        if self._listener is None or (not now and time.perf_counter() - self._reported < PROGRESS_INTERVAL):
            return
        self._reported = time.perf_counter()
        tests = [metrics.test_accuracy for metrics in self.standing.history if metrics.test_accuracy is not None]
        self._listener(
            Progress(
                epoch=epoch,
                epochs=self.task.recipe.epochs,
                step=step,
                steps=self.task.steps,
                loss=loss,
                accuracy=accuracy,
                test_accuracy=tests[-1] if tests else None,
                images_per_second=self.clock.rate(),
                seconds_left=self.clock.seconds_left((self.task.steps - step) * self.task.batch_size),
            )
        )

    def result(self, notes: tuple[str, ...]) -> TrainingResult:
        """The result of the finished run."""
        standing, last = self.standing, self.standing.history[-1]
        assert last.test_accuracy is not None  # the last epoch is always tested
        return TrainingResult(
            history=standing.history,
            accuracy=last.test_accuracy,
            best_accuracy=standing.best_accuracy,
            best_epoch=standing.best_epoch,
            seconds=last.seconds,
            weights=self.task.directory / saved.WEIGHTS_FILE,
            best_weights=self.task.directory / BEST_FILE,
            notes=notes,
        )
