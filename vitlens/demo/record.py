"""The record of what a visitor of `vitlens demo` exports from Intervene or 3D. Layers, heads and patches from 0."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.arrays import Pixels
from vitlens.record import Contents


@dataclass(frozen=True)
class IntervenedRow:
    """One image with heads and patches off. target: the class predicted with everything on, with its logits; predicted:
    the class predicted then; method, title, signed: of the maps of the target; grid: rows and columns of the patches,
    None where none can be switched off; exact: whether replay was exact, else `note` says why not."""

    image: str
    target: str
    predicted: str
    logit_before: float
    logit_after: float
    method: str
    title: str
    signed: bool
    grid: tuple[int, int] | None
    exact: bool
    note: str


@dataclass(frozen=True)
class HeadOffRow:
    """One head whose output was replaced by zero."""

    layer: int
    head: int

    @property
    def name(self) -> str:
        """The head as it is written."""
        return f"L{self.layer}.H{self.head}"


@dataclass(frozen=True)
class PatchOffRow:
    """One patch to which no token attended. key: its number among the tokens."""

    row: int
    column: int
    key: int


@dataclass(frozen=True)
class ChangedClassRow:
    """One of the leading classes, with everything on and with some off."""

    name: str
    logit_before: float
    logit_after: float
    probability_before: float
    probability_after: float


@dataclass(frozen=True)
class SpaceRow:
    """The attention of one image in space. reading: whose attention it is; points: of all layers, heads and patches;
    shown: the strongest of them; grid: rows and columns of a head's plane."""

    image: str
    reading: str
    points: int
    shown: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class PointRow:
    """One of the strongest points. share: of the attention, relative to a uniform map (1: uniform)."""

    layer: int
    head: int
    row: int
    column: int
    share: float


_Map = Annotated[NDArray[np.floating[Any]], Form("f", (None, None))]
_Places = Annotated[NDArray[np.integer[Any]], Form("i", (None,))]


@dataclass(frozen=True)
class IntervenedArrays:
    """pixels: the image as the model saw it; before, after: the maps of the target (rows, columns), raw."""

    pixels: Pixels
    before: _Map
    after: _Map


@dataclass(frozen=True)
class PointArrays:
    """The points that are shown: layer, head, row, column and share of each (points,)."""

    layer: _Places
    head: _Places
    row: _Places
    column: _Places
    share: Annotated[NDArray[np.floating[Any]], Form("f", (None,))]


INTERVENED = TableOf("intervened", IntervenedRow)
HEADS_OFF = TableOf("heads_off", HeadOffRow)
PATCHES_OFF = TableOf("patches_off", PatchOffRow)
CLASSES = TableOf("classes", ChangedClassRow)
SPACE = TableOf("space", SpaceRow)
STRONGEST = TableOf("strongest", PointRow)
INTERVENED_ARRAYS = ArraysOf("intervened", IntervenedArrays)
POINTS = ArraysOf("points", PointArrays)

RECORD = Contents(
    tables=(INTERVENED, HEADS_OFF, PATCHES_OFF, CLASSES, SPACE, STRONGEST), arrays=(INTERVENED_ARRAYS, POINTS)
)
