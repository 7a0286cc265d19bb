"""The record of `vitlens stats`.

Layers and heads count from 0. Statistics are those of analysis/heads/registry.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from vitlens.analysis.heads.registry import (
    FAULTY,
    LABELS,
    MIXED,
    THRESHOLD,
    UNLABELLED,
    head_statistics,
    shown_in,
)
from vitlens.arrays import Stack
from vitlens.commands.shared.label_rows import NameRow, NoteRow
from vitlens.record import OfModel, Record, arrays, col, head_name, table
from vitlens.uncertainty import Estimate, Side, beyond

FEW: Final = 2  # images, below which nothing is judged

Numbers: TypeAlias = Mapping[str, Estimate]
"""Means over images by statistic, without those that a head or layer does not have."""


@dataclass(frozen=True)
class HeadRow(OfModel):
    """One head, means over images.

    label: the pattern that it follows, or that it follows none or several; None if the layer's
        tokens have no place in the image.
    best: the pattern that explains most of the information in its attention.
    score: the share of this information that `best` explains.
    other: the pattern with the highest score among those that contradict `best`.
    place: row and column of the patch that receives most attention.
    place_grid: rows and columns of patches.
    place_mass: the attention on that patch.
    place_chance: the same for uniform attention.
    """

    layer: int = col("layer")
    head: int = col("head")
    statistics: Numbers = col(
        "statistics", metric="{key}/{model}/L{layer}.H{head}", keys=partial(shown_in, "each head")
    )
    label: str | None = col("attends to", default=None)
    score: Estimate | None = col(
        "score",
        term="the share of the information in a head's attention that the best pattern explains",
        default=None,
    )
    best: str | None = col("best pattern", default=None)
    other: str | None = col("next pattern", default=None)
    other_score: float | None = col("next score", default=None)
    explained_by_offset: float | None = col(
        "explained by offset",
        unit="fraction",
        term="the share of the variance of the weights that the offset from query to key explains",
        default=None,
    )
    place: tuple[int, int] | None = col("most attended patch (row, column)", default=None)
    place_grid: tuple[int, int] | None = col("patches (rows, columns)", default=None)
    place_mass: Estimate | None = col("attention on it", default=None)
    place_chance: float | None = col("of uniform attention", unit="fraction", default=None)
    output: Estimate | None = col(
        "added to the residual stream",
        term="the norm of what a head adds to the residual stream, a share of the mean of the "
        "model's heads",
        default=None,
    )

    name = head_name

    @property
    def is_clear(self) -> bool:
        """Return True if its label names one pattern."""
        return self.label in LABELS and self.label not in (MIXED, UNLABELLED)


@dataclass(frozen=True)
class LayerRow(OfModel):
    """One layer.

    module: the name of the attention module.
    keys: the number of keys of a query.
    statistics: the statistics of the tokens after the block.
    grid: rows and columns of patches, None if its tokens have no place in the image.
    unplaced: why they have none, None if they have one.
    uniform_distance: mean distance of uniform attention.
    """

    layer: int = col("layer")
    module: str = col("module")
    kind: str = col("kind")
    heads: int = col("heads")
    keys: int = col("keys")
    statistics: Numbers = col("statistics")
    grid: tuple[int, int] | None = col("patches (rows, columns)", default=None)
    unplaced: str | None = col("without a place", default=None)
    uniform_distance: float | None = col("distance of uniform attention", unit="px", default=None)


@dataclass(frozen=True)
class HeadsRow(OfModel):
    """All heads of one model.

    heads: the number of heads with a label.
    labels: the number of heads by label.
    statistics: means over heads.
    sinks_off_object: the attention on sinks off the object, None without masks.
    faulty: the share of dead and uniform heads, as `faulty_share` returns it; None without labels.
    """

    heads: int = col("heads with a label")
    labels: Mapping[str, int] = col("labels")
    statistics: Numbers = col("statistics", metric="{key}/{model}", keys=head_statistics)
    sinks_off_object: Estimate | None = col(
        "attention on sinks off the object",
        better="lower",
        metric="sinks_off_object/{model}",
        share=True,
        default=None,
    )
    faulty: Estimate | None = col(
        "dead or uniform heads",
        better="lower",
        metric="dead_or_uniform_heads/{model}",
        share=True,
        default=None,
    )


def faulty_share(heads: Sequence[HeadRow], *, images: int) -> Estimate | None:
    """Return the share of dead and uniform heads among those with a label; None without any.

    The upper end counts heads that more images may show to be such heads, too. One image gives no
    interval.
    """
    labelled = [head for head in heads if head.label is not None]
    if not labelled:
        return None
    faulty = 0
    undecided = 0
    for head in labelled:
        if head.label in FAULTY:
            faulty += 1
        elif head.best in FAULTY:
            is_below = head.score is not None and beyond(head.score, THRESHOLD) is Side.BELOW
            if not is_below:
                undecided += 1
    count = len(labelled)
    share = faulty / count
    if images < FEW:
        return Estimate(share, n=count)
    return Estimate(share, share, (faulty + undecided) / count, count)


@dataclass(frozen=True)
class LocalHeadsRow(OfModel):
    """The local heads of the first or the last quarter of the layers that have a distance.

    part: "first" or "last".
    layers: the numbers of these layers.
    heads: the number of their heads.
    local: the number of heads with at most half the distance of uniform attention.
    share: the mean distance over heads, divided by that of uniform attention.
    """

    part: str = col("part")
    layers: tuple[int, ...] = col("layers")
    heads: int = col("heads")
    local: int = col("local heads")
    share: float = col("distance, of that of uniform attention", unit="fraction")


@dataclass(frozen=True)
class EpochRow(OfModel):
    """Means over heads with the weights of one checkpoint.

    epochs: the number of epochs that it was trained.
    """

    epochs: int = col("epoch")
    statistics: Numbers = col(
        "statistics", metric="learning/{model}/{key}/{epochs}", keys=head_statistics
    )


@dataclass(frozen=True)
class HeadEpochRow:
    """One head with the weights of one checkpoint.

    epochs: the number of epochs that it was trained.
    statistics: means over images by statistic.
    """

    epochs: int = col("epoch")
    layer: int = col("layer")
    head: int = col("head")
    statistics: Mapping[str, float] = col("statistics")


@dataclass(frozen=True)
class OffsetArrays:
    """Mean attention by offset, key minus query: by layer, (heads, 2 rows - 1, 2 columns - 1).

    layer: the mean attention.
    ratio: the same divided by that of uniform attention, NaN where no pair of patches has the
        offset.
    """

    layer: Mapping[int, Stack]
    ratio: Mapping[int, Stack]


@dataclass(frozen=True, kw_only=True)
class StatsRecord(Record):
    """Every head of a model, and over a training.

    heads: a row for each head.
    names, notes: three tested labels for each head, and notes on them.
    layers: a row for each layer.
    means: all heads together.
    local: local heads of the first and the last layers.
    learning, learning_heads: over a training, means over heads and each head.
    offsets: attention by offset.
    """

    heads: tuple[HeadRow, ...] = table()
    names: tuple[NameRow, ...] = table()
    notes: tuple[NoteRow, ...] = table()
    layers: tuple[LayerRow, ...] = table()
    means: tuple[HeadsRow, ...] = table()
    local: tuple[LocalHeadsRow, ...] = table()
    learning: tuple[EpochRow, ...] = table()
    learning_heads: tuple[HeadEpochRow, ...] = table()
    offsets: Mapping[str, OffsetArrays] = arrays("offsets-{model}")
