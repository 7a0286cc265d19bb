"""The record of `vitlens look`. Layers and heads count from 0."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.heads.labels import MIXED
from vitlens.archives import Form
from vitlens.commands.scaffold.explorer.record import EXPLORER, EXPLORER_ARRAYS
from vitlens.commands.scaffold.head_words import head_words
from vitlens.names import Replacement
from vitlens.records import ArraysOf, Contents, Pixels, TableOf, UntrustedName

PLACED = frozenset(("position", "sink"))  # labels that one image cannot tell apart


@dataclass(frozen=True)
class LookRow:
    """What holds for all images. chosen: how the model came to be taken, "" where it was named; digits: whether it
    knows the classes of digits alone; method, title, signed: of the maps; replace: what replaced the output of a head
    that was ablated, None for a model without heads; note: a remark on it; images: that were looked at; heads: of the
    model, `labelled` of them with a label, `faulty` of these dead or uniform."""

    chosen: str
    digits: bool
    method: str
    title: str
    signed: bool
    replace: Replacement | None
    note: str
    images: int
    heads: int
    labelled: int
    faulty: int


@dataclass(frozen=True)
class LookImageRow:
    """One image, by its number."""

    number: int
    image: UntrustedName


@dataclass(frozen=True)
class LookClassRow:
    """One of an image's most probable classes. rank: from 0."""

    number: int
    rank: int
    name: UntrustedName
    probability: float


@dataclass(frozen=True)
class LookHeadRow:
    """One head for one image's prediction: the rise of its loss without the head (nats; positive: the head supports the
    prediction), and the prediction's probability then.

    label: what the head attends to, on the images given; score: the highest of a label; best, other: the label with it,
    and the highest that contradicts it; None where the attention has no place in the image.
    """

    number: int
    layer: int
    head: int
    delta_loss: float
    probability: float
    label: str | None
    best: str | None
    other: str | None
    score: float | None

    @property
    def name(self) -> str:
        """The head as it is written."""
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


LOOK = TableOf("look", LookRow)
IMAGES = TableOf("images", LookImageRow)
CLASSES = TableOf("classes", LookClassRow)
HEADS = TableOf("heads", LookHeadRow)
MAPS = ArraysOf("look", LookArrays)

RECORD = Contents(tables=(LOOK, IMAGES, CLASSES, HEADS, EXPLORER), arrays=(MAPS, EXPLORER_ARRAYS))
