"""The record of a study that adapts a trained model to other data in several ways."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Pixels, Stack
from vitlens.commands.study.kinds.record import KindRecord, OfVariant
from vitlens.record import arrays, col, head_name, table
from vitlens.uncertainty import Estimate

Floats: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class CurveRow(OfVariant):
    """One epoch of one training.

    epochs: completed.
    seconds: since the training began.
    loss: in nats.
    """

    seed: int = col("seed")
    epochs: int = col("epoch")
    seconds: float = col("time", unit="s")
    loss: float = col("loss", unit="nats")
    accuracy: float = col("test accuracy, mean over seeds", unit="fraction")


@dataclass(frozen=True)
class ReachedRow(OfVariant):
    """When the mean test accuracy over seeds first came near the best of all variants.

    epochs, seconds: of training until then; None: never.
    """

    accuracy: float = col("accuracy to be reached", unit="fraction")
    epochs: int | None = col("epochs", default=None)
    seconds: float | None = col("time", unit="s", default=None)


@dataclass(frozen=True)
class MovedRow(OfVariant):
    """How far training moved the attention of all heads.

    between: the same between two trainings with different seeds.
    beyond: heads that moved further than between seeds, by the lower end of their intervals.
    """

    moved: Estimate = col(
        "moved attention",
        term="the share of a head's attention that lies on other keys after training (total "
        "variation), mean over queries, images and seeds",
        metric="attention_moved/{label}",
    )
    heads: int = col("heads")
    between: float | None = col("between seeds", unit="fraction", default=None)
    beyond: int | None = col("heads beyond seeds", default=None)


@dataclass(frozen=True)
class HeadMovedRow(OfVariant):
    """How far training moved the attention of one head, with an interval over test images.

    between: the same between two trainings with different seeds.
    """

    layer: int = col("layer")
    head: int = col("head")
    moved: Estimate = col("moved attention")
    between: float | None = col("between seeds", unit="fraction", default=None)

    name = head_name


@dataclass(frozen=True)
class ShiftRow:
    """A statistic of one head after full training minus before, over test images and seeds.

    p_holm: Student's t test over images, corrected for the heads.
    """

    statistic: str = col("statistic")
    layer: int = col("layer")
    head: int = col("head")
    before: float = col("before")
    change: Estimate = col("change")
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class SimilarityRow(OfVariant):
    """Linear CKA between a layer before and after training, on test images; value and ends are
    means over seeds.
    """

    layer: int = col("layer")
    cka: Estimate = col(
        "CKA with the layer before", term="linear CKA: 1 where features are equal up to rotation"
    )


@dataclass(frozen=True)
class ProbeRow(OfVariant):
    """Test accuracy of a linear probe on one layer: of the pretrained model, of random weights, or
    after training.
    """

    layer: int = col("layer")
    accuracy: Estimate = col("accuracy of a linear probe")
    chance: float = col("accuracy of guessing", unit="fraction")


@dataclass(frozen=True)
class MapRow:
    """An image whose maps are shown, with its class and predictions.

    before: one of the model's original classes; "" if it has no classifier.
    after: one of the data's classes.
    """

    image: str = col("image")
    name: str = col("class")
    before: str = col("prediction before")
    after: str = col("prediction after")


@dataclass(frozen=True)
class MapArrays:
    """Images with their maps before and after full training.

    images: (images, 3, height, width).
    before, after: the attention of the last layer, mean over heads (images, rows, columns).
    rollout_before, rollout_after: the rollout, of the same shape; None if the model has none.
    """

    images: Pixels
    before: Stack
    after: Stack
    rollout_before: Stack | None = None
    rollout_after: Stack | None = None


@dataclass(frozen=True, kw_only=True)
class TransferRecord(KindRecord):
    """A comparison of ways of adapting one model, and what training changed inside it."""

    curves: tuple[CurveRow, ...] = table()
    reached: tuple[ReachedRow, ...] = table()
    moved: tuple[MovedRow, ...] = table()
    heads_moved: tuple[HeadMovedRow, ...] = table()
    head_shifts: tuple[ShiftRow, ...] = table()
    layer_similarity: tuple[SimilarityRow, ...] = table()
    probes: tuple[ProbeRow, ...] = table()
    maps: tuple[MapRow, ...] = table()
    map_arrays: MapArrays | None = arrays("maps")
