"""The record of `vitlens attention`. Layers, heads, rows and columns count from 0; sizes are (rows,
columns).
"""

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
    """One layer with a map, the mean of its heads.

    reading: the query whose attention the map shows.
    previous: None for the first layer, and after a change of size.
    share, share_of_baseline, share_difference: None without masks.
    head_information: by head; None in folders of earlier versions.
    head_prefix_mass: by head; None also without prefix tokens.
    """

    layer: int = col("layer")
    module: str = col("module")
    kind: str = col("kind")
    heads: int = col("heads")
    map: Size = col("map (rows, columns)")
    reading: str = col("row shown")
    prefix_mass: float = col(
        "on CLS and registers",
        unit="fraction",
        term="share of the query's attention on tokens before the patches",
    )
    alike: Estimate = col(
        "heads alike", term="cosine similarity of the maps of two heads, mean over pairs"
    )
    previous: Estimate | None = col(
        "like the layer before",
        term="cosine similarity of the mean map to that of the previous layer",
        default=None,
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
    """One image.

    content: a digest of its file or pixels, hexadecimal; "" in folders of earlier versions.
    """

    image: str = col("image")
    content: str = col("content", default="")


@dataclass(frozen=True)
class LayoutRow(OfModel):
    """The layout of the patches, and the correlation of position embeddings with their distance.

    Sizes in px are (height, width). Correlations are None without position embeddings.

    distance: Pearson's correlation, of the similarity of two embeddings with their distance.
    ranks: of all pairs, of pairs in one row, and of pairs in one column.
    """

    grid: Size = col("patches (rows, columns)")
    prefix: tuple[str, ...] = col("tokens before them")
    patch_size: Size = col("patch (px)")
    image_size: Size = col("image (px)")
    distance: Estimate | None = col(
        "correlation with distance", metric="positions/{model}/distance_correlation", default=None
    )
    ranks: Mapping[str, Estimate] | None = col(
        "rank correlation with nearness",
        term="Spearman's correlation of the cosine similarity of two patches' position "
        "embeddings with minus their distance: 1 if nearer patches are always more similar, 0 "
        "without such order",
        metric="positions/{model}/rank_correlation/{key}",
        default=None,
    )


@dataclass(frozen=True)
class PatchRow:
    """The attention from one patch (table query) or to it (key) in one layer, mean over heads and
    images.

    prefix: the attention to all prefix tokens; in the table key, from one of them. None without
        such tokens.
    padding: the attention on places of its window without a patch.
    received: the attention from all patches together.
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
    """One layer with windows; sizes are in patches.

    padding: places of the windows without a patch.
    pairs: ordered pairs of patches that meet in a window.
    reach: in patches of the first map of the stage, mean over patches.
    patch: the patch (row, column) whose reach the arrays hold.
    new: pairs that do not meet in the previous layer; None for the first.
    """

    layer: int = col("layer")
    map: Size = col("map")
    window: Size = col("window")
    shift: Size = col("shift")
    windows: int = col("windows")
    padding: int = col("padded places")
    pairs: int = col("pairs that meet")
    reach: float = col(
        "reach (patches)",
        term="patches on which one patch can depend through attention up to a layer",
    )
    patch: Size = col("patch of the figure")
    new: int | None = col("of them new", default=None)


@dataclass(frozen=True)
class CheckpointRow(OfModel):
    """The maps of a model after a number of epochs, 0 before the training; means over images.

    map: "rollout", or "attention" of the last layer of a model without rollout.
    """

    epochs: int = col("epochs")
    map: str = col("map")
    information: Estimate = col("information", metric="learning/{model}/map_information/{epochs}")
    final: Estimate = col(
        "correlation with the final map",
        term="Pearson's correlation, over patches, of the map with that of the last weights",
        metric="learning/{model}/correlation_with_final_map/{epochs}",
    )


@dataclass(frozen=True)
class TrainingArrays:
    """Maps over a training (images, checkpoints, rows, columns), of the first images."""

    maps: Stacks


@dataclass(frozen=True)
class AttentionArrays:
    """Images and maps."""

    images: Pixels
    layer: Mapping[int, Stacks]  # by row of the table of layers: (images, heads, rows, columns)
    rollout: Stacks | None = None  # up to the layer of each row (images, layers, rows, columns)
    similarity: Matrix | None = None  # cosine similarity of position embeddings (patches, patches)

    @property
    def pixels(self) -> NDArray[np.floating]:
        """Return the images in [0, 1]."""
        return np.asarray(self.images / np.float32(255))


@dataclass(frozen=True)
class HeadArrays:
    """Statistics of every head on every image (heads, images), layer by layer, for paired tests."""

    information: Matrix  # bits
    prefix_mass: Matrix  # fractions, 0 without prefix tokens
    groups: Indices | None = None  # (images,), of images that share a source


@dataclass(frozen=True)
class ViewArrays:
    """The maps of a view, by row of its table."""

    mean: Mapping[int, Stack]  # over heads (images, rows, columns)


@dataclass(frozen=True)
class WindowArrays:
    """The windows of each layer, by row of the table of windows."""

    part: Mapping[int, IndexMatrix]  # of each patch (rows, columns)
    reach: Mapping[int, FlagMatrix]  # patches on which the row's patch depends (rows, columns)
    mask: Mapping[int, FlagMatrix]  # of the last window (query, key)


@dataclass(frozen=True, kw_only=True)
class AttentionRecord(Record):
    """The attention of every head of one model on a few images, and the views of the options."""

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
    over_training: tuple[CheckpointRow, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    maps: AttentionArrays | None = arrays("attention")
    by_image: HeadArrays | None = arrays("heads")
    views: Mapping[str, ViewArrays] = arrays("view-{view}")
    training_maps: TrainingArrays | None = arrays("over_training")
    window_maps: WindowArrays | None = arrays("windows")
    field_maps: FieldArrays | None = arrays("receptive_fields")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")

    def values_by_image(self) -> Mapping[str, ImageValues]:
        """Return the values of every head on the images, by the name of the metric that is their
        mean.
        """
        values: dict[str, ImageValues] = {}
        if self.by_image is None:
            return values
        groups = self.by_image.groups
        row_of_head = 0  # in the arrays: the heads of all layers, one after another
        for row in self.layers:
            for head in range(row.heads):
                information = self.by_image.information[row_of_head]
                prefix_mass = self.by_image.prefix_mass[row_of_head]
                row_of_head += 1
                place = f"{row.model}/L{row.layer}.H{head}"
                values[f"map_information/{place}"] = ImageValues(information, groups)
                if row.head_prefix_mass is not None:
                    values[f"prefix_attention/{place}"] = ImageValues(prefix_mass, groups)
        return values

    @property
    def names(self) -> list[str]:
        """Return the file names of the images."""
        return file_names([row.image for row in self.shown])
