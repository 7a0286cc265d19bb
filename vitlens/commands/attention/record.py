"""What `vitlens attention` records. Layers, heads, rows and columns count from 0; sizes are (rows, columns)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import FlagMatrix, IndexMatrix, Indices, Matrix, Pixels, Stack, Stacks
from vitlens.commands.shared.explorer import ExplorerArrays, ExplorerRow
from vitlens.commands.shared.maps.record import MapRow, MixedHeadsRow, OnObjectRow
from vitlens.commands.shared.receptive import FieldArrays, FieldRow
from vitlens.commands.shared.sheets import file_names
from vitlens.record import ImageValues, OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate

Size: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LayerRow(MapRow):
    """One layer with a map, of the mean of its heads. map: its size in patches; reading: the query whose attention the
    map shows; alike: cosine similarity of the maps of two heads; previous: of the mean map with that of the layer
    before (None for the first, and after a change of size); share: of the map on the object, beside that of the best
    map that ignores the image (None without masks). head_information, head_prefix_mass: by head (None in folders of
    earlier versions; the second also without tokens before the patches)."""

    layer: int = col("layer")
    module: str = col("module")
    kind: str = col("kind")
    heads: int = col("heads")
    map: Size = col("map (rows, columns)")
    reading: str = col("row shown")
    prefix_mass: float = col(
        "on CLS and registers", unit="fraction", term="the share of the query's attention on tokens before the patches"
    )
    alike: Estimate = col("heads alike", term="cosine similarity of the maps of two heads, mean over pairs")
    previous: Estimate | None = col(
        "like the layer before", term="cosine similarity of the mean map to that of the layer before", default=None
    )
    share: Estimate | None = col("attention on the object", better="higher", default=None)
    share_of_baseline: Estimate | None = col("best map that ignores the image", default=None)
    share_difference: Estimate | None = col("beyond that map", better="higher", default=None)
    head_information: Mapping[str, Estimate] | None = col(
        "information in the map of a head",
        metric="map_information/{model}/L{layer}.H{key}",
        default=None,
    )
    head_prefix_mass: Mapping[str, Estimate] | None = col(
        "attention of a head on CLS and registers",
        metric="prefix_attention/{model}/L{layer}.H{key}",
        default=None,
    )


@dataclass(frozen=True)
class UnplacedRow:
    """One layer whose attention cannot be mapped to the image, and why."""

    layer: int = col("layer")
    module: str = col("module")
    kind: str = col("kind")
    reason: str = col("reason")


@dataclass(frozen=True)
class ImageRow:
    """One image. content: a number of its file, or of its pixels where it has none, in hexadecimal digits; "" in
    folders of earlier versions."""

    image: str = col("image")
    content: str = col("content", default="")


@dataclass(frozen=True)
class LayoutRow(OfModel):
    """How the model cuts an image into patches, and how its position embeddings follow the places of the patches.

    Sizes in px are (height, width); distance: Pearson's correlation of their similarity with the distance; ranks:
    Spearman's with the nearness, of all pairs of patches, of those in one row and in one column; None without position
    embeddings."""

    grid: Size = col("patches (rows, columns)")
    prefix: tuple[str, ...] = col("tokens before them")
    patch_size: Size = col("patch (px)")
    image_size: Size = col("image (px)")
    distance: Estimate | None = col(
        "correlation with distance", metric="positions/{model}/distance_correlation", default=None
    )
    ranks: Mapping[str, Estimate] | None = col(
        "rank correlation with nearness",
        term="Spearman's, of the cosine similarity of two patches' position embeddings with minus their distance: 1 "
        "where nearer patches are always more similar, 0 without such order",
        metric="positions/{model}/rank_correlation/{key}",
        default=None,
    )


@dataclass(frozen=True)
class PatchRow:
    """The attention of one patch (table query) or to it (key) in one layer, mean over heads and images.

    itself: of the patch to itself; prefix: from it to tokens before the patches, in key of such a token to it;
    received: the sum over all patches; padding: on the padding of its window. None where there is no such token.
    """

    layer: int = col("layer")
    row: int = col("row")
    column: int = col("column")
    grid: Size = col("map (rows, columns)")
    itself: float = col("on itself", unit="fraction")
    prefix: float | None = col("with CLS and registers", unit="fraction", default=None)
    padding: float | None = col("on padding", unit="fraction", default=None)
    received: float | None = col("received", unit="patches", default=None)


@dataclass(frozen=True)
class WindowRow:
    """One layer in windows. map, window, shift: in patches; padding: places without a patch; pairs: ordered pairs of
    patches that meet; new: of them those that do not meet in the layer before (None: none before on this map); reach:
    patches of its stage's first map on which one patch depends, mean over patches; patch: the one whose reach the
    arrays hold."""

    layer: int = col("layer")
    map: Size = col("map")
    window: Size = col("window")
    shift: Size = col("shift")
    windows: int = col("windows")
    padding: int = col("padded places")
    pairs: int = col("pairs that meet")
    reach: float = col(
        "reach (patches)", term="the patches on which one patch can depend through attention up to a layer"
    )
    patch: Size = col("patch of the figure")
    new: int | None = col("of them new", default=None)


@dataclass(frozen=True)
class AttentionArrays:
    """images: pixels; layer: by row of the table of layers, maps (images, heads, rows, columns); rollout: up to the
    layer of each row (images, layers, rows, columns); similarity: cosine of each pair of position embeddings (patches,
    patches)."""

    images: Pixels
    layer: Mapping[int, Stacks]
    rollout: Stacks | None = None
    similarity: Matrix | None = None

    @property
    def pixels(self) -> NDArray[np.floating]:
        """Return the images in [0, 1]."""
        return np.asarray(self.images / np.float32(255))


@dataclass(frozen=True)
class HeadArrays:
    """By head, layer after layer (heads, images), for tests in pairs of the same images. information: in bits;
    prefix_mass: fractions, 0 without tokens before the patches; groups (images,): as those of a Split."""

    information: Matrix
    prefix_mass: Matrix
    groups: Indices | None = None


@dataclass(frozen=True)
class ViewArrays:
    """By row of the table of the view: mean, maps (images, rows, columns) averaged over heads."""

    mean: Mapping[int, Stack]


@dataclass(frozen=True)
class WindowArrays:
    """By row of the table of windows: part (rows, columns), the part of each patch; reach (rows, columns), the patches
    on which the row's patch depends; mask (places, places), query by key, of the last window."""

    part: Mapping[int, IndexMatrix]
    reach: Mapping[int, FlagMatrix]
    mask: Mapping[int, FlagMatrix]


@dataclass(frozen=True, kw_only=True)
class AttentionRecord(Record):
    """The attention of every head of one model on a few images, and the views that were asked for."""

    layers: tuple[LayerRow, ...] = table()
    without_map: tuple[UnplacedRow, ...] = table()
    shown: tuple[ImageRow, ...] = table()
    on_object: tuple[OnObjectRow, ...] = table()
    layout: tuple[LayoutRow, ...] = table()
    query: tuple[PatchRow, ...] = table()
    key: tuple[PatchRow, ...] = table()
    mixed_heads: tuple[MixedHeadsRow, ...] = table()
    windows: tuple[WindowRow, ...] = table()
    receptive_fields: tuple[FieldRow, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    maps: AttentionArrays | None = arrays("attention")
    by_image: HeadArrays | None = arrays("heads")
    views: Mapping[str, ViewArrays] = arrays("view-{view}")
    window_maps: WindowArrays | None = arrays("windows")
    field_maps: FieldArrays | None = arrays("receptive_fields")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")

    def values_by_image(self) -> Mapping[str, ImageValues]:
        """Return the values of every head on the images, by the name of the metric that is their mean."""
        values: dict[str, ImageValues] = {}
        if self.by_image is None:
            return values
        groups = self.by_image.groups
        heads = [(row, head) for row in self.layers for head in range(row.heads)]
        for (row, head), information, prefix_mass in zip(heads, self.by_image.information, self.by_image.prefix_mass):
            place = f"{row.model}/L{row.layer}.H{head}"
            values[f"map_information/{place}"] = ImageValues(information, groups)
            values[f"prefix_attention/{place}"] = ImageValues(prefix_mass, groups)
        return values

    @property
    def names(self) -> list[str]:
        """Return the images by the names of their files."""
        return file_names([row.image for row in self.shown])
