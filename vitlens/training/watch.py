"""Watching a training from outside: what a watcher is told after steps and epochs. It looks, and changes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vitlens.models.model import Model
from vitlens.training.metrics import EpochMetrics


@dataclass(frozen=True)
class StepFacts:
    """One update of the weights.

    step: updates done, this one included; epoch: from 0; loss: nats, mean over this process's images of the batch;
    learning_rate: the update's; gradient_norm: Euclidean, over all parameters, before clipping; images_per_second: of
    training alone, over all processes, since start or resume.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float
    images_per_second: float


@runtime_checkable
class Watcher(Protocol):
    """What `fit` tells its steps and epochs to, in the first process alone.

    What it raises ends the training: one that may fail without harm catches its own errors.
    """

    def on_step(self, facts: StepFacts) -> None:
        """After an update."""
        ...

    def on_epoch(self, metrics: EpochMetrics, model: Model) -> None:
        """After an epoch's look at the test images, with the weights that were tested; they are not to be changed."""
        ...

    def close(self) -> None:
        """At the end, also of a training that failed."""
        ...


@contextmanager
def watched(watchers: Sequence[Watcher]) -> Iterator[Sequence[Watcher]]:
    """The watchers, each closed on exit, by success or error, the last one first."""
    with ExitStack() as stack:
        for watcher in watchers:
            stack.callback(watcher.close)
        yield watchers
