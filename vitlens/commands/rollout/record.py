"""What `vitlens rollout` records: kinds of map, how two of them agree, the images, and the maps themselves."""

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
    """One kind of map ("rollout-mean" in metrics). name: in figures; method, fusion: its parts; zero: how many maps are
    zero everywhere; readout: the tokens whose row is read (None: the model's own)."""

    name: str = col("map")
    method: str = col("method")
    zero: int = col("zero everywhere")
    fusion: Fusion | None = col("fusion of heads", default=None)
    readout: Readout | None = col("readout", default=None)
    patch_mass: Estimate | None = col(
        "attention on patches",
        term="the share of the readout's row that lies on patches, not on CLS and registers",
        metric="rollout/{model}/patch_mass/{fusion}",
        default=None,
    )


@dataclass(frozen=True)
class PairRow:
    """Two kinds of map, by their names in figures, of the same images: the mean over images."""

    first: str = col("map")
    second: str = col("and")
    agreement: Estimate = col("rank correlation", term="Spearman's correlation of two maps over the patches")


@dataclass(frozen=True)
class ImageRow:
    """One image; None where the model has no classifier. target: the class of which maps with gradients are."""

    image: str = col("image")
    prediction: str | None = col("prediction", default=None)
    probability: float | None = col("probability", unit="fraction", default=None)
    target: str | None = col("target class", default=None)


@dataclass(frozen=True)
class RolloutArrays:
    """images: pixels of those that are drawn; maps (images, kinds of map, rows, columns), raw; masks: of the objects,
    where known; hits (images, kinds of map): whether most of a map's maxima lie on the object."""

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
