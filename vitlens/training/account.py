"""The account of a run, kept alike over images and over cached features: epochs, progress, checkpoint, result."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from vitlens.errors import InputError
from vitlens.models import saved
from vitlens.processes import Processes
from vitlens.schema import Between, Count, read_as
from vitlens.training.checkpoint import Checkpoint, require_same
from vitlens.training.clock import Clock
from vitlens.training.metrics import EpochMetrics, Progress, Standing, TrainingResult
from vitlens.training.task import Task

BEST_FILE = "best.safetensors"
PROGRESS_INTERVAL = 0.1  # seconds; an eye follows no faster


@dataclass(frozen=True)
class Facts:
    """What a checkpoint keeps besides tensors: whose it is, how far it came, and in what time."""

    identity: Mapping[str, object]
    step: Count
    seconds: Annotated[float, Between(0, 1e10)]
    standing: Standing


class Account:
    """What is known of a run besides tensors.

    clock: has run since the run began; on_progress: told of it in the first process.
    """

    def __init__(
        self, task: Task, processes: Processes, clock: Clock, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.task, self.clock = task, clock
        self.standing = Standing()
        self._listener = on_progress if processes.is_first else None
        self._told = 0.0

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. Raises InputError when it is of another run."""
        source = f"the checkpoint in {self.task.directory}"
        facts = read_as(Facts, dict(checkpoint.facts), source=source, hint="train anew in another folder")
        require_same(facts.identity, self.task.identity(), folder=self.task.directory)
        done, history = facts.step // self.task.steps_per_epoch, facts.standing.history
        looked = not history or facts.step < self.task.steps or history[-1].test_accuracy is not None
        if facts.step > self.task.steps or len(history) != done or not looked:
            raise InputError(
                f"expected {source} to tell of {done} epochs, at most {self.task.recipe.epochs}, found {len(history)}; "
                "train anew in another folder"
            )
        self.standing = facts.standing
        self.clock = Clock(seconds=facts.seconds + self.clock.seconds())

    def facts(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors."""
        return {
            "identity": self.task.identity(),
            "step": step,
            "seconds": self.clock.seconds(),
            "standing": asdict(self.standing),
        }

    def is_due(self, epoch: int) -> bool:
        """Whether the test images are looked at after this epoch; after the last one they always are."""
        recipe = self.task.recipe
        return epoch + 1 == recipe.epochs or (epoch + 1) % recipe.evaluate_every == 0

    def close(
        self, epoch: int, step: int, sums: Sequence[float], looked: tuple[float, float] | tuple[None, None]
    ) -> EpochMetrics:
        """Write an epoch down.

        sums: over its images and processes: loss, right ones, images, norms of gradients; looked: loss and accuracy.
        """
        task, (loss, correct, images, norms) = self.task, sums
        metrics = EpochMetrics(
            epoch=epoch,
            step=step,
            images=step * task.batch_size,
            learning_rate=task.learning_rate(step - 1),
            train_loss=loss / images,
            train_accuracy=correct / images,
            test_loss=looked[0],
            test_accuracy=looked[1],
            seconds=self.clock.seconds(),
            images_per_second=self.clock.epoch_rate(),
            gradient_norm=norms / task.steps_per_epoch,
        )
        self.standing = self.standing.after(metrics)
        return metrics

    def tell(self, epoch: int, step: int, loss: float, accuracy: float, *, now: bool = False) -> None:
        """Tell whoever listens, now or when it is time again. loss, accuracy: means of this epoch."""
        if self._listener is None or (not now and time.perf_counter() - self._told < PROGRESS_INTERVAL):
            return
        self._told = time.perf_counter()
        looks = [metrics.test_accuracy for metrics in self.standing.history if metrics.test_accuracy is not None]
        self._listener(
            Progress(
                epoch=epoch,
                epochs=self.task.recipe.epochs,
                step=step,
                steps=self.task.steps,
                loss=loss,
                accuracy=accuracy,
                test_accuracy=looks[-1] if looks else None,
                images_per_second=self.clock.rate(),
                seconds_left=self.clock.seconds_left((self.task.steps - step) * self.task.batch_size),
            )
        )

    def result(self, notes: tuple[str, ...]) -> TrainingResult:
        """How the run ended."""
        standing, last = self.standing, self.standing.history[-1]
        assert last.test_accuracy is not None  # the last epoch always looks
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
