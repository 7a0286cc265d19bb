"""The record of `vitlens reversal`.

Heads, queries and keys count from 0. Losses are mean squared errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Form
from vitlens.names import SequencePositions, SequenceTask, SequenceView
from vitlens.record import Record, arrays, col, table
from vitlens.uncertainty import Estimate

# the cells of a head's weights (query, key) where a layer that solves the task attends
PATHS: Final[Mapping[SequenceTask, str]] = MappingProxyType(
    {"reverse": "anti-diagonal", "copy": "diagonal", "sort": "diagonal of the sorted keys"}
)


@dataclass(frozen=True)
class LayerRow:
    """The task, the layer and how well it does the task on new sequences.

    batch: the number of sequences in a training step.
    width: the number of components of a vector.
    place_distance: the mean distance of two position embeddings.
    vector_distance: the mean distance of two vectors.
    uniform: the loss of uniform attention.
    without_positions: the least possible loss of a layer without positions.
    length: the number of vectors in a sequence.
    steps: the number of training steps.
    """

    batch: int
    width: int
    place_distance: float
    vector_distance: float
    uniform: float
    without_positions: float
    task: SequenceTask = col("task")
    length: int = col("vectors")
    heads: int = col("heads")
    positions: SequencePositions = col("positions")
    steps: int = col("steps")
    parameters: int = col("parameters")
    loss: Estimate = col(
        "loss",
        term="the mean squared error of the output on new sequences",
        better="lower",
        metric="loss/{task}",
    )
    remaining: Estimate = col(
        "remaining loss",
        term="the loss as a share of that of uniform attention",
        better="lower",
        metric="remaining_loss/{task}",
    )
    share: Estimate = col(
        "attention on the right token",
        term="the attention weight on the token that is the answer, mean over heads and queries",
        better="higher",
        metric="attention_on_answer/{task}",
    )

    @property
    def path(self) -> str:
        """Return where a layer that solves the task attends."""
        return PATHS[self.task]

    @property
    def chance(self) -> float:
        """Return the share of uniform attention on the right token."""
        return 1 / self.length


@dataclass(frozen=True)
class LossRow:
    """The mean loss of some consecutive steps of the training.

    step: the last of these steps, counted from 1.
    """

    step: int = col("step")
    loss: float = col("loss")
    uniform: float = col("loss of uniform attention")


@dataclass(frozen=True)
class HeadRow:
    """The attention of one head.

    task: the task, for the name of the metric.
    share: the attention on the right token, mean over queries and sequences.
    uniform: the same for uniform attention.
    followed: the number of queries with the largest weight on the path of the task.
    """

    task: SequenceTask
    head: int = col("head")
    share: Estimate = col(
        "attention on the right token",
        better="higher",
        metric="attention_on_answer/{task}/{head}",
    )
    uniform: float = col("uniform attention", unit="fraction")
    followed: int = col("queries whose largest weight is on the path")


@dataclass(frozen=True)
class ViewRow:
    """The trained layer with queries and keys computed from a part of its input."""

    view: SequenceView = col("queries and keys computed from")
    loss: Estimate = col("loss")
    share: Estimate = col("attention on the right token")


@dataclass(frozen=True)
class ReversalArrays:
    """The attention of the layer.

    weights: (heads, queries, keys), mean over new sequences.
    """

    weights: Annotated[NDArray[np.floating], Form("f", (None, None, None))]


@dataclass(frozen=True, kw_only=True)
class ReversalRecord(Record):
    """One attention layer trained on a task."""

    layer: tuple[LayerRow, ...] = table()
    losses: tuple[LossRow, ...] = table()
    by_head: tuple[HeadRow, ...] = table()
    views: tuple[ViewRow, ...] = table()
    maps: ReversalArrays | None = arrays("maps")

    @property
    def row(self) -> LayerRow:
        """Return the layer."""
        return self.layer[0]
