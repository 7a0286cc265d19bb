"""The record of `vitlens attention`. Layers, heads, rows and columns count from 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.attention.window_rows import WINDOW_MAPS, WINDOWS
from vitlens.commands.scaffold.explorer.record import EXPLORER, EXPLORER_ARRAYS
from vitlens.commands.scaffold.maps.information import InformationRow
from vitlens.commands.scaffold.maps.on_object import ON_OBJECT
from vitlens.commands.scaffold.mixed_heads import MIXED_HEADS
from vitlens.commands.scaffold.position_order import RANK_CORRELATION
from vitlens.commands.scaffold.receptive.record import FIELD_MAPS, FIELDS
from vitlens.records import ArraysOf, Contents, MetricName, Pixels, TableOf, UntrustedName
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class LayerRow:
    """One layer with a map. map: its rows and columns; reading: the query whose attention the map shows; prefix_mass:
    the fraction of that query's attention on prefix tokens."""

    layer: int
    module: str
    kind: str
    heads: int
    queries: int
    keys: int
    map: str
    reading: str
    prefix_mass: float


@dataclass(frozen=True)
class UnplacedLayerRow:
    """One layer whose attention cannot be mapped to the image, and why."""

    layer: int
    module: str
    kind: str
    reason: str


@dataclass(frozen=True)
class AttentionImageRow:
    """One image."""

    image: UntrustedName


@dataclass(frozen=True)
class LayoutRow:
    """How the model cuts an image into patches, and the data's images; sizes in px as (height, width)."""

    grid: tuple[int, int]
    prefix: tuple[str, ...]
    patch_size: tuple[int, int]
    image_size: tuple[int, int]

    @property
    def whole(self) -> bool:
        """Whether the patches cover the images exactly, so that a figure can show the image cut into them."""
        covered = (self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1])
        return tuple(self.image_size) == covered


@dataclass(frozen=True)
class QueryRow:
    """The attention of one patch in one layer, as fractions, mean over heads and images.

    itself: on the patch itself; prefix_mass: on prefix tokens; head_prefix_mass: the same of the chosen head; padding:
    on the padding of its window. None where there is no such token or head.
    """

    layer: int
    row: int
    column: int
    grid: str
    itself: float
    prefix_mass: float | None
    head_prefix_mass: float | None
    padding: float | None


@dataclass(frozen=True)
class KeyRow:
    """The attention to one patch in one layer, mean over heads and images. received: the sum over all patches; itself,
    from_prefix: of the patch itself and of a prefix token, as fractions of their attention. None where there is no such
    token or head."""

    layer: int
    row: int
    column: int
    grid: str
    itself: float
    received: float
    head_received: float | None
    from_prefix: float | None


@dataclass(frozen=True)
class CheckpointMapRow:
    """One head with the weights of one checkpoint; epochs: those done at it."""

    epochs: int
    file: UntrustedName
    prefix_mass: float


@dataclass(frozen=True)
class CheckpointCountRow:
    """The number of checkpoints whose weights were kept."""

    kept: int


@dataclass(frozen=True)
class LayerAlikeRow:
    """Cosine similarities in one layer, means over images. alike: of the maps of two of its heads; previous: of the
    mean map and that of the layer before (None for the first layer, and after a change of size)."""

    layer: int
    heads: int
    alike: float
    alike_low: float | None
    alike_high: float | None
    previous: float | None
    previous_low: float | None
    previous_high: float | None
    n: int

    @property
    def between_heads(self) -> Estimate:
        """The similarity of the heads, with its interval."""
        return Estimate(self.alike, self.alike_low, self.alike_high, self.n, "")

    @property
    def to_previous(self) -> Estimate | None:
        """The similarity to the layer before, with its interval."""
        return (
            None
            if self.previous is None
            else Estimate(self.previous, self.previous_low, self.previous_high, self.n, "")
        )


@dataclass(frozen=True)
class MatrixRow:
    """The N x N weights of one head on the first image. prefix: tokens before the patches; itself: the mean weight of a
    token on itself; most, received: the token with the largest mean weight over all queries, and that weight;
    deviation: of the scores of all pairs."""

    layer: int
    head: int
    tokens: int
    prefix: tuple[str, ...]
    itself: float
    most: int
    received: float
    deviation: float

    @property
    def name(self) -> str:
        """The head as it is written."""
        return f"L{self.layer}.H{self.head}"


HeadMaps: TypeAlias = Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None, None))]
LayerMeans: TypeAlias = Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None))]


@dataclass(frozen=True)
class AttentionArrays:
    """images: pixels; layer: by row of the table of layers, maps (images, heads, rows, columns)."""

    images: Pixels
    layer: HeadMaps


@dataclass(frozen=True)
class DevelopmentArrays:
    """rollout: up to each layer, maps (images, layers, rows, columns)."""

    rollout: Annotated[NDArray[np.floating], Form("f", (None, None, None, None))]


@dataclass(frozen=True)
class PositionArrays:
    """similarity: cosine of each pair of position embeddings (patches, patches)."""

    similarity: Annotated[NDArray[np.floating], Form("f", (None, None))]


@dataclass(frozen=True)
class ViewArrays:
    """By row of the table of the view: mean, maps (images, rows, columns) averaged over heads; head: of one head."""

    mean: LayerMeans
    head: LayerMeans


@dataclass(frozen=True)
class CheckpointMapArrays:
    """maps: one head's (images, checkpoints, rows, columns)."""

    maps: Annotated[NDArray[np.floating], Form("f", (None, None, None, None))]


@dataclass(frozen=True)
class MatrixArrays:
    """Scores (-inf where masked) and weights of one head (query, key)."""

    scores: Annotated[NDArray[np.floating], Form("f", (None, None))]
    weights: Annotated[NDArray[np.floating], Form("f", (None, None))]


LAYERS = TableOf("layers", LayerRow)
WITHOUT_MAP = TableOf("without_map", UnplacedLayerRow)
IMAGES = TableOf("images", AttentionImageRow)
LAYOUT = TableOf("layout", LayoutRow)
QUERY = TableOf("query", QueryRow)
KEY = TableOf("key", KeyRow)
TRAINING = TableOf("training", CheckpointMapRow)
CHECKPOINT_COUNT = TableOf("kept", CheckpointCountRow)

CHECKS = TableOf("map_checks", InformationRow, optional=True)
ALIKE = TableOf("alike", LayerAlikeRow, optional=True)

MATRIX = TableOf("matrix", MatrixRow, optional=True)

MAPS = ArraysOf("attention", AttentionArrays)
DEVELOPMENT_MAPS = ArraysOf("development", DevelopmentArrays)
POSITIONS = ArraysOf("positions", PositionArrays)
QUERY_MAPS = ArraysOf("query", ViewArrays)
KEY_MAPS = ArraysOf("key", ViewArrays)
TRAINING_MAPS = ArraysOf("training", CheckpointMapArrays)
MATRIX_ARRAYS = ArraysOf("matrix", MatrixArrays)

DISTANCE_CORRELATION = MetricName("positions/{model}/distance_correlation")
POINTING = MetricName("localisation/{model}/pointing/{layer}")  # of the mean map of a layer's heads

RECORD = Contents(
    metrics=(DISTANCE_CORRELATION, RANK_CORRELATION, POINTING),
    tables=(
        LAYERS, WITHOUT_MAP, IMAGES, ON_OBJECT, LAYOUT, QUERY, KEY, TRAINING, CHECKPOINT_COUNT, CHECKS,
        ALIKE, MATRIX, MIXED_HEADS, EXPLORER, WINDOWS, FIELDS,
    ),
    arrays=(
        MAPS, DEVELOPMENT_MAPS, POSITIONS, QUERY_MAPS, KEY_MAPS, TRAINING_MAPS, MATRIX_ARRAYS, EXPLORER_ARRAYS,
        WINDOW_MAPS, FIELD_MAPS,
    ),
)  # fmt: skip
