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
    """Model and methods of all images.

    chosen: why the model was chosen, "" if the user named it.
    digits: True if the model knows only digits.
    method, title: the name and the title of the method of the maps.
    note: a note on the ablation of heads.
    heads: the number of heads of the model.
    replace: what replaces the output of ablated heads, None without heads.
    """

    chosen: str = col("model taken")
    digits: bool = col("knows only digits")
    method: str = col("method")
    title: str = col("map")
    note: str = col("note")
    images: int = col("images")
    heads: int = col("heads")
    replace: Replacement | None = col("replaced by", default=None)


@dataclass(frozen=True)
class LookHeadRow:
    """One head for one image's prediction.

    delta_loss: the rise of the loss without the head; positive if it supports the prediction.
    probability: that of the prediction without the head.
    label: None if attention has no place in the image.
    attends: the label in words.
    """

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
class PhraseRow:
    """One phrase for one image.

    number: the number of the image.
    probability: among several phrases, None for a single one.
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
        score = f"similarity {self.similarity:.3f}"
        if self.probability is not None:
            score += f", {percent(self.probability, 1)}"
        return score


@dataclass(frozen=True)
class GivenRow:
    """An array of attention weights.

    found: True if `prefix` was inferred from the number of tokens.
    rows: the number of rows of weights, one for each layer, head and query.
    off: the number of rows that do not sum to 1.
    least, most: the smallest and the largest sum.
    """

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
    """One layer of an array of attention weights, means over heads.

    information: the information of the mean map of the patches.
    on_prefix: attention of patches on the tokens before them, None without such tokens.
    """

    layer: int = col("layer")
    information: float = col("information", unit="bits")
    distance: float = col(
        "distance", unit="patches", term="mean distance from a patch to the patches it attends to"
    )
    sinks: float = col(
        "on sinks",
        unit="fraction",
        term="attention of patches on the few patches that receive most",
    )
    on_prefix: float | None = col("on tokens before the patches", unit="fraction", default=None)


@dataclass(frozen=True)
class LookArrays:
    """Images and raw maps.

    pixels: the n images as the model saw them.
    prediction: (n, rows, columns), maps of the most probable class; None for phrases.
    runner_up: (n, rows, columns), maps of the next class; None for phrases and for a single class.
    phrases: (n, phrases, rows, columns), maps of phrases; None for classes.
    """

    pixels: Pixels
    prediction: Stack | None = None
    runner_up: Stack | None = None
    phrases: Stacks | None = None


@dataclass(frozen=True)
class GivenArrays:
    """The image of an array of attention weights, and a map of each layer.

    pixels: (1, 3, height, width).
    maps: (layers, rows, columns), mean over heads of the attention of the first prefix token, or of
        all tokens without a prefix.
    """

    pixels: Pixels
    maps: Stack


@dataclass(frozen=True)
class StageRow(OfModel):
    """Some consecutive layers.

    layers: the number of the layer, or of the first and the last one.
    heads: the number of their heads.
    attends: the number of heads by the one pattern that they follow.
    unclear: the number of heads without a single pattern.
    range: the mean distance of attention, divided by that of uniform attention.
    head: the head without which the loss rises most, "" if none was removed.
    loss: the rise of the loss without it.
    """

    layers: str = col("layers")
    heads: int = col("heads")
    attends: Mapping[str, int] = col("attend to")
    unclear: int = col("no single pattern")
    range: float | None = col(
        "distance, of uniform attention",
        unit="fraction",
        term="mean distance in px from a query to the attended patches, divided by that of uniform "
        "attention",
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
    """One model on a few images, or an array of attention weights.

    Of an array, only `given`, `given_layers`, `given_maps` and the explorer are filled.

    look: one row.
    predictions: a row for each image, of a model of classes.
    phrases: in their place, of a model of phrases: by image, in the order of the phrases.
    heads: by image, the head that matters most first.
    stages: some consecutive layers each.
    """

    look: tuple[LookRow, ...] = table()
    predictions: tuple[PredictionRow, ...] = table()
    phrases: tuple[PhraseRow, ...] = table()
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
        """Return the file names of the images, with a number if they repeat."""
        if self.phrases:
            first = self.phrases[0].phrase
            return file_names([row.image for row in self.phrases if row.phrase == first])
        return file_names([row.image for row in self.predictions])

    def phrases_of(self, image: int) -> tuple[PhraseRow, ...]:
        """Return the phrases of an image, in their order."""
        return tuple(row for row in self.phrases if row.number == image)

    def answer(self, image: int) -> tuple[str, float]:
        """Return the most probable class or phrase of an image, and its probability.

        Of a single phrase, the probability is 0.
        """
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
            phrases = [row.phrase for row in self.phrases_of(0)]
            return {phrase: self.maps.phrases[:, index] for index, phrase in enumerate(phrases)}
        maps_by_title = {}
        if self.maps.prediction is not None:
            maps_by_title["prediction"] = self.maps.prediction
        if self.maps.runner_up is not None:
            maps_by_title["runner-up"] = self.maps.runner_up
        return maps_by_title

    def heads_of(self, image: int, most: int = 3) -> tuple[LookHeadRow, ...]:
        """Return the heads that matter most for an image's prediction."""
        return tuple(row for row in self.heads if row.number == image)[:most]
