"""What `vitlens look` records. Layers and heads count from 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Pixels, Stack
from vitlens.commands.shared.explorer import ExplorerArrays, ExplorerRow
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.commands.shared.sheets import file_names
from vitlens.names import Replacement
from vitlens.record import OfModel, Record, arrays, col, head_name, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class LookRow:
    """What holds for all images. chosen: how the model came to be taken, "" where it was named; digits: whether it
    knows the classes of digits alone; method, title: of the maps; note: a remark on the ablation; images: that were
    looked at; heads: of the model; replace: what replaced the output of a head that
    was ablated, None for a model without heads."""

    chosen: str = col("model taken")
    digits: bool = col("knows digits alone")
    method: str = col("method")
    title: str = col("map")
    note: str = col("note")
    images: int = col("images")
    heads: int = col("heads")
    replace: Replacement | None = col("replaced by", default=None)


@dataclass(frozen=True)
class LookHeadRow:
    """One head for one image's prediction. delta_loss: positive: the head supports the prediction; probability: the
    prediction's, without the head; label: of what the head attends to, on the images given, None where the attention
    has no place in the image."""

    number: int = col("number of the image")
    layer: int = col("layer")
    head: int = col("head")
    delta_loss: float = col("rise of the loss without it", unit="nats")
    probability: float = col("probability without it", unit="fraction")
    label: str | None = col("label", default=None)
    image: str | None = col("image", default=None)
    attends: str | None = col("attends to", unit="text", default=None)

    name = head_name


@dataclass(frozen=True)
class GivenRow:
    """Attention weights that were given as an array. found: whether the number of prefix tokens was found from that of
    all tokens; rows: of weights; off: of them those whose sum is not 1; least, most: sums of rows."""

    file: str = col("file")
    image: str = col("image")
    layers: int = col("layers")
    heads: int = col("heads")
    tokens: int = col("tokens")
    prefix: int = col("tokens before the patches")
    found: bool = col("found from the number of tokens")
    rows: int = col("rows")
    off: int = col("rows that do not sum to 1")
    least: float = col("least sum")
    most: float = col("greatest sum")


@dataclass(frozen=True)
class GivenLayerRow:
    """One layer of given weights, means over heads. information: of the mean map; sinks: the attention of the patches
    on patches that receive far more than others; on_prefix: None without prefix tokens."""

    layer: int = col("layer")
    information: float = col("information", unit="bits")
    distance: float = col("distance", unit="patches", term="the mean distance from a patch to those it attends to")
    sinks: float = col("on sinks", unit="fraction", term="the attention of patches on a few that receive most from all")
    on_prefix: float | None = col("on tokens before the patches", unit="fraction", default=None)


@dataclass(frozen=True)
class LookArrays:
    """pixels: of the images as the model saw them; prediction, runner_up: the maps of the most probable class and of
    the next (n, rows, columns), raw; runner_up is None for a model of one class."""

    pixels: Pixels
    prediction: Stack
    runner_up: Stack | None = None

    @property
    def named(self) -> Mapping[str, NDArray[np.floating[Any]]]:
        """Return the maps that there are, by whose evidence they show."""
        return {"prediction": self.prediction} | ({} if self.runner_up is None else {"runner-up": self.runner_up})


@dataclass(frozen=True)
class GivenArrays:
    """pixels: of the image (1, 3, height, width); maps (layers, rows, columns): of each layer, the mean of its heads,
    from the first token before the patches, or the mean of all tokens where there is none."""

    pixels: Pixels
    maps: Stack


@dataclass(frozen=True)
class StageRow(OfModel):
    """Some layers in a row.

    attends: heads by the one pattern that they follow; unclear: heads that follow none or several; range: their
    attention distance, as a share of that of uniform attention; head: the one without which the loss rises most.
    """

    layers: str = col("layers")
    heads: int = col("heads")
    attends: Mapping[str, int] = col("attend to")
    unclear: int = col("no single pattern")
    range: float | None = col(
        "distance, of uniform attention",
        unit="fraction",
        term="the mean distance in px from query to attended patch, divided by that of uniform attention",
        default=None,
    )
    head: str = col("head", default="")
    loss: Estimate | None = col("rise of the loss without its most important head", default=None)

    @property
    def several(self) -> bool:
        """Return True if it is more than one layer."""
        return not self.layers.isdecimal()

    @property
    def matters(self) -> bool:
        """Return True if the loss rises without its most important head."""
        return self.loss is not None and self.loss.value > 0


@dataclass(frozen=True, kw_only=True)
class LookRecord(Record):
    """What one model sees in a few images. predictions, heads: by image, the head that matters most first; given: of
    weights that were looked at in the place of a model's, where all but the explorer and its arrays is empty."""

    look: tuple[LookRow, ...] = table()
    predictions: tuple[PredictionRow, ...] = table()
    heads: tuple[LookHeadRow, ...] = table()
    stages: tuple[StageRow, ...] = table()
    given: tuple[GivenRow, ...] = table()
    given_layers: tuple[GivenLayerRow, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    given_maps: GivenArrays | None = arrays("given")
    maps: LookArrays | None = arrays("look")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")

    @property
    def names(self) -> list[str]:
        """Return the images by the names of their files, with a number where these repeat."""
        return file_names([row.image for row in self.predictions])

    def heads_of(self, image: int, most: int = 3) -> tuple[LookHeadRow, ...]:
        """Return the heads that matter most for an image's prediction."""
        return tuple(row for row in self.heads if row.number == image)[:most]
