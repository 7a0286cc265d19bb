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
KEPT_FOLDER: Final = "kept"  # of the weights kept at intervals of epochs
_MOST_BYTES: Final = 1 << 28  # of metrics.jsonl


@dataclass(frozen=True)
class Progress:
    """The progress of a training: epoch from 0, steps done and in all, running means of this epoch.

    loss: nats.
    accuracy: fraction of this epoch's training images so far, None without classes.
    test_accuracy: fraction, at the last test (None before the first).
    images_per_second: the speed of training without tests, since start or resume.
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
    """One line of metrics.jsonl: an epoch (from 0), the steps and images by its end, its means.

    learning_rate: the learning rate of its last step; losses in nats; accuracies: fractions, None
        if not measured.
    seconds: since training began, without pauses.
    images_per_second: the speed of training without tests, in this epoch.
    gradient_norm: before clipping, mean over its steps (None in older files).
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
    """A test: mean loss (nats), accuracy (fraction, None without classes), and other measures."""

    loss: float
    accuracy: float | None
    measures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    history: one entry per epoch.
    accuracy: test accuracy (fraction) of the last weights, in model.safetensors.
    best_accuracy, best_epoch: the highest of all tests, whose weights are in best.safetensors
        (selected on the test images, so optimistic), all None without classes.
    seconds: the time in seconds of all its runs together.
    notes: on the computation, as text.
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

    step: updates done, this one included.
    epoch: from 0.
    loss: nats, mean over this process's images of the batch.
    learning_rate: the update's.
    gradient_norm: Euclidean, over all parameters, before clipping.
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
