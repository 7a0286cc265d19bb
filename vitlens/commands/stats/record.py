"""The rows, metrics and arrays of `vitlens stats`. Layers and heads count from 0; statistics are those of
analysis/heads/registry.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.archives import Form
from vitlens.records import ArraysOf, Columns, Contents, MetricName, TableOf
from vitlens.uncertainty import Estimate

ANIMATION: Final = "animations/learning.{form}"  # the animation of a training

Numbers: TypeAlias = Annotated[Mapping[str, float | None], Columns()]
"""Values by statistic, one column each; None where a head or block has no such value."""

_Floats: TypeAlias = Annotated[NDArray[np.floating], Form("f", (None,))]
_Counts: TypeAlias = Annotated[NDArray[np.integer], Form("iu", (None,))]
_Tables: TypeAlias = Annotated[Mapping[str, NDArray[np.floating]], Form("f", (None, None))]
_Curves: TypeAlias = Annotated[Mapping[str, NDArray[np.floating]], Form("f", (None, None, None))]
_Offsets: TypeAlias = Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None))]
_Maps: TypeAlias = Annotated[NDArray[np.floating], Form("f", (None, None, None))]


@dataclass(frozen=True)
class HeadRow:
    """One head: means over images. label: its specialisation, None where the layer's tokens cannot be placed in the
    image; score, low, high: the highest score of a label, with its 95 % interval over images; best: the label with that
    score; other, other_score: the highest among labels that contradict it; explained_by_offset: the share of the
    variance of the weights that the offset from query to key explains; place, place_grid: row and column of the patch
    that receives most attention in the mean over images, and the grid; place_mass: the share of the patches' attention
    on it; place_chance: that of uniform attention; output: norm of what the head adds to the residual stream, as a
    share of the mean of the model's heads. Rows of older versions lack what follows statistics, and their labels follow
    other rules."""

    model: str
    layer: int
    head: int
    label: str | None
    score: float | None
    statistics: Numbers
    low: float | None = None
    high: float | None = None
    best: str | None = None
    other: str | None = None
    other_score: float | None = None
    explained_by_offset: float | None = None
    place: tuple[int, int] | None = None
    place_grid: tuple[int, int] | None = None
    place_mass: float | None = None
    place_mass_low: float | None = None
    place_mass_high: float | None = None
    place_chance: float | None = None
    output: float | None = None
    output_low: float | None = None
    output_high: float | None = None

    @property
    def explained(self) -> Estimate:
        """The highest score with its interval: the share of the information in the head's attention."""
        return Estimate(self.score or 0.0, self.low, self.high)

    @property
    def on_place(self) -> Estimate | None:
        """The share of the patches' attention on the place, with its interval."""
        if self.place_mass is None:
            return None
        return Estimate(self.place_mass, self.place_mass_low, self.place_mass_high)

    @property
    def added(self) -> Estimate | None:
        """The norm of what the head adds, with its interval."""
        return None if self.output is None else Estimate(self.output, self.output_low, self.output_high)

    @property
    def name(self) -> str:
        """L3.H7."""
        return f"L{self.layer}.H{self.head}"


@dataclass(frozen=True)
class AttentionLayerRow:
    """One layer. grid: rows and columns of its patches, None where its tokens cannot be placed in the image; unplaced:
    the reason; uniform_distance: the distance of uniform attention, px; statistics: of the tokens after the block."""

    model: str
    layer: int
    module: str
    kind: str
    heads: int
    keys: int
    grid: tuple[int, int] | None
    unplaced: str | None
    uniform_distance: float | None
    statistics: Numbers


@dataclass(frozen=True)
class RuleRow:
    """One label of heads, and its condition."""

    label: str
    rule: str


@dataclass(frozen=True)
class LocalHeadsRow:
    """How local the heads are in the first or the last quarter of the layers that have a distance.

    local: how many of the heads have at most half the distance of uniform attention; share: their distance as a
    fraction of that of uniform attention, the mean over heads.
    """

    model: str
    part: Literal["first", "last"]
    layers: tuple[int, ...]
    heads: int
    local: int
    share: float


@dataclass(frozen=True)
class BackbonesRow:
    """What two models have in common. comparable: whether both have the same layers, heads and tokens, so that heads of
    the same number can be compared; identical: whether all parameters and buffers before the classifiers are equal;
    parameters: how many values these are."""

    comparable: bool
    identical: bool
    parameters: int


@dataclass(frozen=True)
class DifferingHeadsRow:
    """How many heads differ significantly in one statistic: paired t tests, Holm's correction over its heads."""

    statistic: str
    heads: int
    significant: int


@dataclass(frozen=True)
class HeadDifferenceRow:
    """One head in one statistic, first model minus second, with its paired interval; p_holm: corrected over all heads
    and statistics of this table."""

    statistic: str
    layer: int
    head: int
    difference: float
    low: float | None
    high: float | None
    n: int
    p_holm: float

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high, self.n, STATISTICS[self.statistic].unit)


@dataclass(frozen=True)
class HeadCheckpointRow:
    """One head, with the weights of one checkpoint; epochs: those done at it."""

    epochs: int
    layer: int
    head: int
    statistics: Numbers


@dataclass(frozen=True)
class PositionCheckpointRow:
    """Mean cosine similarity of position embeddings at one checkpoint: of horizontal and vertical neighbours, and of
    all pairs that lie farther apart; None where the grid has no such pair. epochs: those done at it."""

    epochs: int
    neighbours: float | None
    others: float | None


@dataclass(frozen=True)
class StatisticArrays:
    """mean, low, high: by statistic (layers, heads), for statistics of tokens (layers, 1): the means over images and
    their 95 % intervals, NaN where there is none; score: by label (layers, heads); uniform_distance:
    (layers,), px."""

    mean: _Tables
    low: _Tables
    high: _Tables
    score: _Tables
    uniform_distance: _Floats


@dataclass(frozen=True)
class OffsetArrays:
    """By layer (heads, 2 rows - 1, 2 columns - 1): the mean attention by offset, key minus query; ratio: divided by
    that of uniform attention, NaN where no pair of patches has the offset."""

    layer: _Offsets
    ratio: _Offsets


@dataclass(frozen=True)
class HeadDifferenceArrays:
    """By statistic (layers, heads): first model minus second, and p after Holm's correction over its heads."""

    mean: _Tables
    p: _Tables


@dataclass(frozen=True)
class TrainingArrays:
    """epochs (checkpoints,): those done at each; mean, low, high: by statistic (checkpoints, layers, heads);
    uniform_distance (layers,), px; similarity (checkpoints, 2 rows - 1, 2 columns - 1): mean cosine similarity of all
    pairs of position embeddings by offset."""

    epochs: _Counts
    mean: _Curves
    low: _Curves
    high: _Curves
    uniform_distance: _Floats
    similarity: _Maps | None = None


HEADS = TableOf("heads", HeadRow)
LAYERS = TableOf("layers", AttentionLayerRow)
RULES = TableOf("rules", RuleRow)
LOCAL = TableOf("local", LocalHeadsRow)
BACKBONES = TableOf("backbones", BackbonesRow)
DIFFERENCES = TableOf("differences", DifferingHeadsRow)
CHANGES = TableOf("changes", HeadDifferenceRow)
TRAINING = TableOf("learning", HeadCheckpointRow)
POSITIONS = TableOf("positions", PositionCheckpointRow)

STATISTIC_ARRAYS = ArraysOf("stats-{model}", StatisticArrays)
OFFSET_ARRAYS = ArraysOf("offsets-{model}", OffsetArrays)
DIFFERENCE_ARRAYS = ArraysOf("differences", HeadDifferenceArrays)
TRAINING_ARRAYS = ArraysOf("learning", TrainingArrays)

MEAN = MetricName("{statistic}/{model}")  # over all heads
OF_HEAD = MetricName("{statistic}/{model}/L{layer}.H{head}")
SINKS_OFF_OBJECT = MetricName("sinks_off_object/{model}")  # share of patches' attention, mean over heads
FAULTY_HEADS = MetricName("dead_or_uniform_heads/{model}")
DIFFERENCE = MetricName("difference/{first}/{second}/{statistic}")
HEADS_CHANGED = MetricName("heads_changed/{first}/{second}")
MEAN_IN_TRAINING = MetricName("learning/{model}/{statistic}/{epochs}")

RECORD = Contents(
    metrics=(MEAN, OF_HEAD, SINKS_OFF_OBJECT, FAULTY_HEADS, DIFFERENCE, HEADS_CHANGED, MEAN_IN_TRAINING),
    tables=(HEADS, LAYERS, RULES, LOCAL, BACKBONES, DIFFERENCES, CHANGES, TRAINING, POSITIONS),
    arrays=(STATISTIC_ARRAYS, OFFSET_ARRAYS, DIFFERENCE_ARRAYS, TRAINING_ARRAYS),
)
