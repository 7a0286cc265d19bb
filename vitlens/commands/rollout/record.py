"""The record of `vitlens rollout`: kinds of map, their agreement, the images, and the maps."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.arrays import FlagMatrix, Masks, Pixels, Stacks
from vitlens.commands.shared.explorer import ExplorerArrays, ExplorerRow
from vitlens.commands.shared.maps.record import MapRow, MixedHeadsRow
from vitlens.names import Fusion, Readout
from vitlens.record import Record, arrays, col, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True, kw_only=True)
class RolloutRow(MapRow):
    """One kind of map, "rollout-mean" in metrics.

    name: its name in figures, "rollout (mean)".
    zero: the number of maps that are zero everywhere.
    fusion: the fusion of heads, None for methods without one.
    readout: the tokens whose attention is read, None if the model has no such tokens.
    """

    name: str = col("map")
    method: str = col("method")
    zero: int = col("zero everywhere")
    fusion: Fusion | None = col("fusion of heads", default=None)
    readout: Readout | None = col("readout", default=None)
    patch_mass: Estimate | None = col(
        "attention on patches",
        term="share of the readout's row on patches, not on CLS and registers",
        metric="rollout/{model}/patch_mass/{fusion}",
        default=None,
    )


@dataclass(frozen=True)
class PairRow:
    """Two kinds of map of the same images."""

    first: str = col("map")
    second: str = col("and")
    agreement: Estimate = col(
        "rank correlation", term="Spearman's correlation of two maps over the patches"
    )


@dataclass(frozen=True)
class ImageRow:
    """One image; predictions are None without a classifier.

    target: the class whose logit is differentiated.
    """

    image: str = col("image")
    prediction: str | None = col("prediction", default=None)
    probability: float | None = col("probability", unit="fraction", default=None)
    target: str | None = col("target class", default=None)


@dataclass(frozen=True)
class RolloutArrays:
    """Images and raw maps.

    images: the images that are drawn.
    maps: (images, kinds of map, rows, columns).
    masks: the masks of the objects in the drawn images, None if they are not known.
    hits: (images, kinds of map), True if most tied maxima lie on the object.
    """

    images: Pixels
    maps: Stacks
    masks: Masks | None = None
    hits: FlagMatrix | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutRecord(Record):
    """Attention maps of one model over all layers, by several methods."""

    methods: tuple[RolloutRow, ...] = table()
    pairs: tuple[PairRow, ...] = table()
    shown: tuple[ImageRow, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    mixed_heads: tuple[MixedHeadsRow, ...] = table()
    maps: RolloutArrays | None = arrays("rollout")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")
