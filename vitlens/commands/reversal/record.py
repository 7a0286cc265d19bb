"""The record of `vitlens reversal`. Heads, queries and keys count from 0; losses are mean squared
errors.
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
    """The task, the layer and how well it does the task on new sequences."""

    batch: int  # sequences of a step
    width: int  # numbers of a vector
    place_distance: float  # mean distance of two positions
    vector_distance: float  # mean distance of two vectors
    uniform: float  # loss of uniform attention
    without_positions: float  # least loss of a layer without positions
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
    """The mean loss of some steps of the training."""

    step: int = col("step")  # the last of them
    loss: float = col("loss")
    uniform: float = col("loss of uniform attention")


@dataclass(frozen=True)
class HeadRow:
    """The attention of one head."""

    task: SequenceTask  # for the name of its metric
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
    """weights: (heads, query, key), mean over new sequences."""

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
