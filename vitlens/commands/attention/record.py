"""What `vitlens attention` writes. Layers, heads, rows and columns count from 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, Contents, GivenName, MetricName, Pixels, TableOf


@dataclass(frozen=True)
class LayerRow:
    """One layer with a map. map: its rows and columns; reading: whose row of the weights the map is; prefix_mass: the
    fraction of that row on prefix tokens."""

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
    """One layer whose attention has no place in the image, and why."""

    layer: int
    module: str
    kind: str
    reason: str


@dataclass(frozen=True)
class AttentionImageRow:
    """One image."""

    image: GivenName


@dataclass(frozen=True)
class LayoutRow:
    """How the model cuts an image into patches, and the data's images; sizes in px as (height, width)."""

    grid: tuple[int, int]
    prefix: tuple[str, ...]
    patch_size: tuple[int, int]
    image_size: tuple[int, int]

    @property
    def whole(self) -> bool:
        """Whether the images have the size that the patches cover, so that cutting them shows what the model reads."""
        covered = (self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1])
        return tuple(self.image_size) == covered


@dataclass(frozen=True)
class QueryRow:
    """Where a patch looks in one layer, as fractions of its row of the weights, mean over heads and images.

    head_prefix_mass: of the head asked for; padding: on what a window adds. None where that is not there.
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
    """What a patch receives in one layer: received, from all patches together, in rows; itself, from_prefix: what it
    and a prefix token give, as fractions of their rows. None where that is not there."""

    layer: int
    row: int
    column: int
    grid: str
    itself: float
    received: float
    head_received: float | None
    from_prefix: float | None


@dataclass(frozen=True)
class KeptRow:
    """One head with the weights after so many epochs of the training."""

    epochs: int
    file: GivenName
    prefix_mass: float


@dataclass(frozen=True)
class KeptCount:
    """How many moments of the training have weights."""

    kept: int


HeadMaps: TypeAlias = Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None, None))]
LayerMeans: TypeAlias = Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None))]


@dataclass(frozen=True)
class AttentionArrays:
    """images: pixels; layer: by row of the table of layers, maps (images, heads, rows, columns)."""

    images: Pixels
    layer: HeadMaps


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
class KeptArrays:
    """maps: one head's (images, moments, rows, columns)."""

    maps: Annotated[NDArray[np.floating], Form("f", (None, None, None, None))]


LAYERS = TableOf("layers", LayerRow)
WITHOUT_MAP = TableOf("without_map", UnplacedLayerRow)
IMAGES = TableOf("images", AttentionImageRow)
LAYOUT = TableOf("layout", LayoutRow)
QUERY = TableOf("query", QueryRow)
KEY = TableOf("key", KeyRow)
TRAINING = TableOf("training", KeptRow)
KEPT = TableOf("kept", KeptCount)

MAPS = ArraysOf("attention", AttentionArrays)
POSITIONS = ArraysOf("positions", PositionArrays)
QUERY_MAPS = ArraysOf("query", ViewArrays)
KEY_MAPS = ArraysOf("key", ViewArrays)
TRAINING_MAPS = ArraysOf("training", KeptArrays)

DISTANCE_CORRELATION = MetricName("positions/{model}/distance_correlation")

RECORD = Contents(
    metrics=(DISTANCE_CORRELATION,),
    tables=(LAYERS, WITHOUT_MAP, IMAGES, LAYOUT, QUERY, KEY, TRAINING, KEPT),
    arrays=(MAPS, POSITIONS, QUERY_MAPS, KEY_MAPS, TRAINING_MAPS),
)
