"""The reports of a training: progress, steps, a line of metrics.jsonl per epoch, a result."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from vitlens.files import read_bounded, write_text
from vitlens.record import col
from vitlens.typed import parse_json, read_as

if TYPE_CHECKING:  # reports read metrics without torch
    from torch import nn

    from vitlens.models.model import Model

METRICS_FILE: Final = "metrics.jsonl"
KEPT_FOLDER: Final = "kept"  # the folder of weights that are kept at intervals of epochs
_MOST_BYTES: Final = 1 << 28  # most bytes of metrics.jsonl


@dataclass(frozen=True)
class Progress:
    """The progress of a training, with running means of the current epoch.

    epoch: the current epoch, from 0.
    epochs: the number of all epochs.
    step: the number of finished steps.
    steps: the number of all steps.
    loss: the mean loss of this epoch so far, in nats.
    accuracy: the accuracy on this epoch's training images so far, as a fraction; None without
        classes.
    test_accuracy: the accuracy at the last test, as a fraction; None before the first.
    images_per_second: the speed of training without tests, since start or resume.
    seconds_left: the estimated seconds until the end.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    test_accuracy: float | None
    images_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class EpochMetrics:
    """One line of metrics.jsonl: the means of an epoch, and counts at its end.

    epoch: the number of the epoch, from 0.
    step: the number of steps by its end.
    images: the number of images seen by its end.
    learning_rate: the learning rate of its last step.
    train_loss: the mean training loss in nats.
    train_accuracy: the training accuracy as a fraction, or None if it was not measured.
    test_loss: the test loss in nats, or None if it was not measured.
    test_accuracy: the test accuracy as a fraction, or None if it was not measured.
    seconds: the seconds since training began, without pauses.
    images_per_second: the speed of training without tests, in this epoch.
    gradient_norm: the mean gradient norm of its steps before clipping, or None in older files.
    measures: other measures of the test, by name (see training/objectives/pretraining.py).
    """

    epoch: int = col("epoch")
    step: int = col("steps")
    images: int = col("images seen")
    learning_rate: float = col("learning rate")
    train_loss: float = col("training loss", unit="nats")
    train_accuracy: float | None = col("training accuracy", unit="fraction")
    test_loss: float | None = col("test loss", unit="nats")
    test_accuracy: float | None = col("test accuracy", unit="fraction")
    seconds: float = col("time", unit="s")
    images_per_second: float = col("speed", unit="images/s")
    gradient_norm: float | None = col("gradient norm", default=None)
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        """Return the number of epochs done at its end."""
        return self.epoch + 1


def best_of(history: Sequence[EpochMetrics]) -> EpochMetrics | None:
    """Return the first epoch of the highest test accuracy; None if no epoch has one."""
    best: EpochMetrics | None = None
    highest = -1.0
    for epoch in history:
        if epoch.test_accuracy is not None and epoch.test_accuracy > highest:
            best = epoch
            highest = epoch.test_accuracy
    return best


class Tested(NamedTuple):
    """The result of a test.

    loss: the mean loss in nats.
    accuracy: the accuracy as a fraction, or None without classes.
    measures: other measures, by name.
    """

    loss: float
    accuracy: float | None
    measures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    The fields of the best epoch are None without classes. It is selected on the test images, so
    that its accuracy is optimistic.

    history: one entry for each epoch.
    accuracy: the test accuracy of the last weights, as a fraction, or None without classes.
    best_accuracy: the highest accuracy of all tests.
    best_epoch: the epoch of that test.
    seconds: the seconds of all runs of the training together.
    weights: the file of the last weights, model.safetensors.
    best_weights: the file of the weights of the best epoch, best.safetensors.
    notes: notes on the computation.
    """

    history: tuple[EpochMetrics, ...]
    accuracy: float | None
    best_accuracy: float | None
    best_epoch: int | None
    seconds: float
    weights: Path
    best_weights: Path | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepMetrics:
    """One update of the weights.

    step: the number of updates so far, including this one.
    epoch: the current epoch, from 0.
    loss: the mean loss of this process's images of the batch, in nats.
    learning_rate: the learning rate of the update.
    gradient_norm: the Euclidean norm of all gradients before clipping.
    images_per_second: the speed of training without tests, over all processes, since start or
        resume.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float
    images_per_second: float


@runtime_checkable
class Watcher(Protocol):
    """An observer to which `fit` reports its steps and epochs, in the first process only.

    An exception that it raises ends the training.
    """

    def on_step(self, facts: StepMetrics) -> None:
        """Receive the metrics of an update."""
        ...

    def on_epoch(self, metrics: EpochMetrics, model: "Model") -> None:
        """Receive the metrics of an epoch, with the tested weights, which must not be changed."""
        ...

    def close(self) -> None:
        """End the observation, also after an exception."""
        ...


@runtime_checkable
class GradientWatcher(Watcher, Protocol):
    """A Watcher that also receives the gradients of the last update of each epoch."""

    def on_gradients(self, module: "nn.Module") -> None:
        """Receive the trained module, with its gradients before clipping.

        They are set to None after the update. The module must not be changed.
        """
        ...


def write_metrics(folder: Path, history: Iterable[EpochMetrics]) -> None:
    """Write the file with these epochs, atomically. Raises StorageError."""
    lines = [json.dumps(asdict(metrics)) + "\n" for metrics in history]
    write_text(folder / METRICS_FILE, "".join(lines))


def read_metrics(folder: Path) -> tuple[EpochMetrics, ...]:
    """Return the epochs of a training folder. Raises InputError for a missing or broken file."""
    path = folder / METRICS_FILE
    content = read_bounded(path, _MOST_BYTES, what="one JSON line per epoch")
    history = []
    for number, line in enumerate(content.splitlines(), start=1):
        values = parse_json(line, source=str(path))
        history.append(read_as(EpochMetrics, values, source=f"line {number} of {path}"))
    return tuple(history)
