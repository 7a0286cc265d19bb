"""The rows, metrics and arrays that `vitlens rollout` writes."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.scaffold.explorer.record import EXPLORER, EXPLORER_ARRAYS
from vitlens.commands.scaffold.maps.information import InformationRow
from vitlens.commands.scaffold.maps.on_object import ON_OBJECT
from vitlens.commands.scaffold.mixed_heads import MIXED_HEADS
from vitlens.names import Fusion, Readout
from vitlens.records import ArraysOf, Contents, Masks, MetricName, Pixels, TableOf, UntrustedName
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class MapRow:
    """One kind of map. method: its name in metrics ("rollout-mean"); kind, fusion: its parts (fusion: None but for
    rollout); readout: the tokens whose row is read; empty_maps: how many maps are zero everywhere."""

    method: str
    kind: str
    fusion: Fusion | None
    readout: Readout | None
    empty_maps: int


@dataclass(frozen=True)
class RolloutImageRow:
    """One image: the prediction with its probability, and the target class; None where there is no classifier."""

    image: UntrustedName
    prediction: UntrustedName | None
    probability: float | None
    target: UntrustedName | None


@dataclass(frozen=True)
class MapPairRow:
    """Two kinds of map of the same images: Spearman's correlation over patches, the mean over images."""

    first: str
    second: str
    agreement: float
    low: float | None
    high: float | None
    n: int

    @property
    def estimate(self) -> Estimate:
        """The correlation with its interval."""
        return Estimate(self.agreement, self.low, self.high, self.n, "")


@dataclass(frozen=True)
class RolloutArrays:
    """images: pixels of those that are drawn; maps (images, methods, rows, columns), raw; masks: of the objects, where
    known; hits (images, methods): whether most of a map's maxima lie on the
    object."""

    images: Pixels
    maps: Annotated[NDArray[np.floating], Form("f", (None, None, None, None))]
    masks: Masks | None = None
    hits: Annotated[NDArray[np.bool_], Form("b", (None, None))] | None = None


MAPS = TableOf("methods", MapRow)
IMAGES = TableOf("images", RolloutImageRow)
CHECKS = TableOf("map_checks", InformationRow, optional=True)
MAP_PAIRS = TableOf("map_agreement", MapPairRow, optional=True)
ROLLOUT = ArraysOf("rollout", RolloutArrays)

PATCH_MASS = MetricName("rollout/{model}/patch_mass/{fusion}")
POINTING = MetricName("localisation/{model}/pointing/{method}")

RECORD = Contents(
    metrics=(PATCH_MASS, POINTING),
    tables=(MAPS, IMAGES, CHECKS, MAP_PAIRS, ON_OBJECT, MIXED_HEADS, EXPLORER),
    arrays=(ROLLOUT, EXPLORER_ARRAYS),
)
