"""What `vitlens look` records. Layers and heads count from 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.heads.labels import MIXED
from vitlens.archives import Form
from vitlens.commands.scaffold.explorer.record import ExplorerArrays, ExplorerRow
from vitlens.commands.scaffold.head_words import head_words
from vitlens.commands.scaffold.predictions import PredictionRow
from vitlens.names import Replacement
from vitlens.record import Record, arrays, col, table
from vitlens.records import Pixels

PLACED = frozenset(("position", "sink"))  # labels that one image cannot tell apart


@dataclass(frozen=True)
class LookRow:
    """What holds for all images. chosen: how the model came to be taken, "" where it was named; digits: whether it
    knows the classes of digits alone; method, title, signed: of the maps; note: a remark on the ablation; images: that
    were looked at; heads: of the model, `labelled` of them with a label, `faulty` of these dead or uniform; replace:
    what replaced the output of a head that was ablated, None for a model without heads."""

    chosen: str = col("model taken")
    digits: bool = col("knows digits alone")
    method: str = col("method")
    title: str = col("map")
    signed: bool = col("signed")
    note: str = col("note")
    images: int = col("images")
    heads: int = col("heads")
    labelled: int = col("heads with a label")
    faulty: int = col("dead or uniform heads")
    replace: Replacement | None = col("replaced by", default=None)


@dataclass(frozen=True)
class LookHeadRow:
    """One head for one image's prediction. delta_loss: positive: the head supports the prediction; probability: the
    prediction's, without the head; label: what the head attends to, on the images given; score: the highest of a label;
    best, other: the label with it, and the highest that contradicts it; None where the attention has no place in the
    image."""

    number: int = col("number of the image")
    layer: int = col("layer")
    head: int = col("head")
    delta_loss: float = col("rise of the loss without it", unit="nats")
    probability: float = col("probability without it", unit="fraction")
    label: str | None = col("label", default=None)
    best: str | None = col("best pattern", default=None)
    other: str | None = col("next pattern", default=None)
    score: float | None = col("score", default=None)

    @property
    def name(self) -> str:
        """L3.H7."""
        return f"L{self.layer}.H{self.head}"

    def words(self, images: int) -> str:
        """What it attends to, in a few words; images: that this rests on."""
        if self.label is None or self.best is None or self.score is None:
            return "not labelled"
        named = {self.best, self.other} if self.label == MIXED else {self.label}
        if images == 1 and named <= PLACED:
            return "the same few places for all patches (fixed, or chosen by this image)"
        return head_words(self.label, self.best, self.other, self.score)


_Maps = Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None))]


@dataclass(frozen=True)
class LookArrays:
    """pixels: of the images as the model saw them; prediction, runner_up: the maps of the most probable class and of
    the next (n, rows, columns), raw; runner_up is None for a model of one class."""

    pixels: Pixels
    prediction: _Maps
    runner_up: _Maps | None = None


@dataclass(frozen=True, kw_only=True)
class LookRecord(Record):
    """What one model sees in a few images. predictions, heads: by image, the head that matters most first."""

    command: ClassVar[str] = "look"
    look: tuple[LookRow, ...] = table()
    predictions: tuple[PredictionRow, ...] = table()
    heads: tuple[LookHeadRow, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    maps: LookArrays | None = arrays("look")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")

    @property
    def names(self) -> list[str]:
        """The images by the names of their files, with a number where these repeat."""
        files = [Path(row.image).name for row in self.predictions]
        return [f"{at}: {name}" if files.count(name) > 1 else name for at, name in enumerate(files)]

    def heads_of(self, image: int, most: int = 3) -> tuple[LookHeadRow, ...]:
        """The heads that matter most for an image's prediction."""
        return tuple(row for row in self.heads if row.number == image)[:most]


RECORD = LookRecord
