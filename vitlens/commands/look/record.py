"""The record of `vitlens look`. Layers and heads count from 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Pixels, Stack, Stacks
from vitlens.commands.shared.explorer import ExplorerArrays, ExplorerRow
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.commands.shared.sheets import file_names
from vitlens.names import Replacement
from vitlens.record import OfModel, Record, arrays, col, head_name, table
from vitlens.report.numbers import percent
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class LookRow:
    """Model and methods of all images."""

    chosen: str = col("model taken")  # why the model was chosen; "" if the user named it
    digits: bool = col("knows only digits")
    method: str = col("method")  # of the maps
    title: str = col("map")
    note: str = col("note")  # on the ablation
    images: int = col("images")
    heads: int = col("heads")  # of the model
    # of ablated heads; None without heads
    replace: Replacement | None = col("replaced by", default=None)


@dataclass(frozen=True)
class LookHeadRow:
    """One head for one image's prediction."""

    number: int = col("number of the image")
    layer: int = col("layer")
    head: int = col("head")
    # positive: supports the prediction
    delta_loss: float = col("rise of the loss without it", unit="nats")
    probability: float = col("probability without it", unit="fraction")
    label: str | None = col("label", default=None)  # None if attention has no place in the image
    image: str | None = col("image", default=None)
    attends: str | None = col("attends to", unit="text", default=None)

    name = head_name


@dataclass(frozen=True)
class PhraseRow:
    """One phrase for one image.

    number: of the image; probability: among several phrases, None for a single one.
    """

    number: int = col("number of the image")
    image: str = col("image")
    phrase: str = col("phrase")
    similarity: float = col(
        "similarity",
        term="the cosine of the angle between the embeddings of an image and of a phrase",
    )
    probability: float | None = col("probability among them", unit="fraction", default=None)

    @property
    def score(self) -> str:
        """Return the similarity, and the probability if there is one."""
        text = f"similarity {self.similarity:.3f}"
        return text if self.probability is None else f"{text}, {percent(self.probability, 1)}"


@dataclass(frozen=True)
class GivenRow:
    """An array of attention weights."""

    file: str = col("file")
    image: str = col("image")
    layers: int = col("layers")
    heads: int = col("heads")
    tokens: int = col("tokens")
    prefix: int = col("tokens before the patches")
    found: bool = col("found from the number of tokens")
    rows: int = col("rows")  # of weights, each over the keys
    off: int = col("rows that do not sum to 1")
    least: float = col("least sum")
    most: float = col("greatest sum")


@dataclass(frozen=True)
class GivenLayerRow:
    """One layer of an array of attention weights, means over heads."""

    layer: int = col("layer")
    information: float = col("information", unit="bits")  # of the mean map
    distance: float = col(
        "distance", unit="patches", term="mean distance from a patch to the patches it attends to"
    )
    sinks: float = col(
        "on sinks",
        unit="fraction",
        term="attention of patches on the few patches that receive most",
    )
    on_prefix: float | None = col(  # None without prefix tokens
        "on tokens before the patches", unit="fraction", default=None
    )


@dataclass(frozen=True)
class LookArrays:
    """Images and raw maps (n, rows, columns)."""

    pixels: Pixels  # as the model saw the images
    prediction: Stack | None = None  # maps of the most probable class, None for phrases
    runner_up: Stack | None = None  # maps of the next class, None for a model with one class
    phrases: Stacks | None = None  # (n, phrases, rows, columns), in place of these


@dataclass(frozen=True)
class GivenArrays:
    """The image of an array of attention weights, and a map of each layer, the mean of its
    heads."""

    pixels: Pixels  # (1, 3, height, width)
    # (layers, rows, columns), from the first prefix token or, without one, the mean of all tokens
    maps: Stack


@dataclass(frozen=True)
class StageRow(OfModel):
    """Some consecutive layers."""

    layers: str = col("layers")
    heads: int = col("heads")
    attends: Mapping[str, int] = col("attend to")  # heads by the one pattern that they follow
    unclear: int = col("no single pattern")  # heads
    range: float | None = col(
        "distance, of uniform attention",
        unit="fraction",
        term="mean distance in px from a query to the attended patches, divided by that of uniform "
        "attention",
        default=None,
    )
    head: str = col("head", default="")  # without which the loss rises most
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
    """One model on a few images, or an array of attention weights: `given`, with only the explorer
    and its arrays. A model of phrases has `phrases` in place of `predictions`.
    """

    look: tuple[LookRow, ...] = table()
    predictions: tuple[PredictionRow, ...] = table()
    phrases: tuple[PhraseRow, ...] = table()  # by image, in the order of the phrases
    heads: tuple[LookHeadRow, ...] = table()  # by image, the head that matters most first
    stages: tuple[StageRow, ...] = table()
    given: tuple[GivenRow, ...] = table()
    given_layers: tuple[GivenLayerRow, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    given_maps: GivenArrays | None = arrays("given")
    maps: LookArrays | None = arrays("look")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")

    @property
    def names(self) -> list[str]:
        """Return the file names of the images, with a number if they repeat."""
        if self.phrases:
            first = self.phrases[0].phrase
            return file_names([row.image for row in self.phrases if row.phrase == first])
        return file_names([row.image for row in self.predictions])

    def phrases_of(self, image: int) -> tuple[PhraseRow, ...]:
        """Return the phrases of an image, in their order."""
        return tuple(row for row in self.phrases if row.number == image)

    def answer(self, image: int) -> tuple[str, float]:
        """Return the most probable class of an image and its probability, among several classes."""
        if not self.phrases:
            row = self.predictions[image]
            return row.class_1, row.probability_1
        best = max(self.phrases_of(image), key=lambda row: row.similarity)
        return best.phrase, best.probability or 0.0

    @property
    def map_titles(self) -> Mapping[str, NDArray[np.floating[Any]]]:
        """Return the maps (n, rows, columns) by what their evidence is for."""
        if self.maps is None:
            return {}
        if self.maps.phrases is not None:
            titles = [row.phrase for row in self.phrases_of(0)]
            return {title: self.maps.phrases[:, index] for index, title in enumerate(titles)}
        named = {"prediction": self.maps.prediction, "runner-up": self.maps.runner_up}
        return {title: maps for title, maps in named.items() if maps is not None}

    def heads_of(self, image: int, most: int = 3) -> tuple[LookHeadRow, ...]:
        """Return the heads that matter most for an image's prediction."""
        return tuple(row for row in self.heads if row.number == image)[:most]
