"""The rows, metrics and arrays of `vitlens study --kind transfer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, MetricName, Pixels, TableOf, UntrustedName
from vitlens.schema import Count


@dataclass(frozen=True)
class TransferRow:
    """The design. model: its alias; pretrained: number of classes it was trained on; last: blocks that the regime of
    the last blocks trains, of `blocks`; compared: test images on which attention is compared, similar: CKA."""

    model: str
    pretrained: Count
    data: UntrustedName
    train_images: Count
    test_images: Count
    classes: Count
    seeds: Count
    epochs: Count
    blocks: Count
    last: Count
    compared: Count
    similar: Count


@dataclass(frozen=True)
class RegimeRow:
    """One regime: its trained parameters of all, epochs, steps, and recipe in words; seconds: median over seeds of a
    training with its evaluations; before: of the trainings that it needs first (a teacher's)."""

    label: str
    trained: Count
    parameters: Count
    epochs: Count
    steps: Count
    recipe: str
    seconds: float
    before: float


@dataclass(frozen=True)
class CurveRow:
    """One epoch of one training; epochs: done; seconds: since it began; loss: nats; accuracy: on the test images."""

    label: str
    seed: int
    epochs: Count
    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class ReachedRow:
    """When the mean test accuracy over seeds first reached REACHED times the best of all regimes; None: never."""

    label: str
    accuracy: float
    epochs: int | None
    seconds: float | None


@dataclass(frozen=True)
class ShareRow:
    """Accuracy (fraction) of a regime on a share of the training images, over seeds and test images."""

    label: str
    share: float
    images: Count
    accuracy: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ShareGapRow:
    """The accuracy of a regime minus that of training from scratch on the same images, points; p over seeds and test
    images, p_holm: corrected for the shares of this regime."""

    label: str
    share: float
    images: Count
    gap: float
    low: float | None
    high: float | None
    p: float
    p_holm: float


@dataclass(frozen=True)
class HeadChangeRow:
    """How far a head's attention moved from the pretrained model's: the share of attention on other keys (fraction),
    mean over queries, test images and seeds, with an interval over images; between: the same between trainings of
    different seeds (None for one seed)."""

    label: str
    layer: Count
    head: Count
    moved: float
    low: float | None
    high: float | None
    between: float | None


@dataclass(frozen=True)
class HeadShiftRow:
    """The change of one statistic of a head, after minus before, mean over test images and seeds; p_holm: that of
    Student's t over images, corrected for the heads."""

    label: str
    statistic: str
    layer: Count
    head: Count
    before: float
    change: float
    low: float | None
    high: float | None
    p_holm: float


@dataclass(frozen=True)
class ClassChangeRow:
    """How far attention moved on the images of one class, mean over all heads, as HeadChangeRow."""

    label: str
    name: UntrustedName
    images: Count
    moved: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SimilarityRow:
    """Linear CKA between a layer before and the same layer after, on test images; mean over seeds of value and ends."""

    label: str
    layer: Count
    cka: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ProbeRow:
    """Test accuracy (fraction) of a linear probe on one layer; label: "pretrained", "random" or "full"."""

    label: str
    layer: Count
    accuracy: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MapRow:
    """An image whose maps are shown: its class and the predictions before (of the model's own classes) and after."""

    image: UntrustedName
    name: UntrustedName
    before: UntrustedName
    after: UntrustedName


Values = NDArray[np.floating[Any]]
Stack = Annotated[Values, Form("f", (None, None, None))]  # (images, rows, columns)


@dataclass(frozen=True)
class MapArrays:
    """The images of the maps, and each map before and after: attention of the last layer, mean over heads, and rollout
    (None where the model has none); mean_before, mean_after: of the last layer's map, over all compared images."""

    images: Pixels
    before: Stack
    after: Stack
    mean_before: Annotated[Values, Form("f", (None, None))]
    mean_after: Annotated[Values, Form("f", (None, None))]
    rollout_before: Stack | None = None
    rollout_after: Stack | None = None


@dataclass(frozen=True)
class SimilarityArrays:
    """cka: by place of its regime among those that change features, (layers before, layers after); first seed."""

    cka: Annotated[Mapping[int, Values], Form("f", (None, None))]


TRANSFER = TableOf("transfer", TransferRow, optional=True)
REGIME_ROWS = TableOf("regimes", RegimeRow, optional=True)
CURVES = TableOf("curves", CurveRow, optional=True)
REACHED_ROWS = TableOf("reached", ReachedRow, optional=True)
SHARE_ROWS = TableOf("shares", ShareRow, optional=True)
SHARE_GAPS = TableOf("share_gaps", ShareGapRow, optional=True)
HEAD_CHANGES = TableOf("head_changes", HeadChangeRow, optional=True)
HEAD_SHIFTS = TableOf("head_shifts", HeadShiftRow, optional=True)
CLASS_CHANGES = TableOf("class_changes", ClassChangeRow, optional=True)
SIMILARITIES = TableOf("layer_similarity", SimilarityRow, optional=True)
PROBES = TableOf("probes", ProbeRow, optional=True)
MAPS = TableOf("maps", MapRow, optional=True)
MAP_ARRAYS = ArraysOf("maps", MapArrays)
SIMILARITY_ARRAYS = ArraysOf("layer_similarity", SimilarityArrays)

PROBE_GAIN = MetricName("probe_gain/{model}/{against}")  # points, on the last layer
MOVED = MetricName("attention_moved/{model}")  # mean over all heads

TRANSFER_TABLES: Final[tuple[TableOf[Any], ...]] = (
    TRANSFER, REGIME_ROWS, CURVES, REACHED_ROWS, SHARE_ROWS, SHARE_GAPS, HEAD_CHANGES, HEAD_SHIFTS, CLASS_CHANGES,
    SIMILARITIES, PROBES, MAPS,
)  # fmt: skip
