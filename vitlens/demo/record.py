"""The record of Intervene in `vitlens demo`. Layers, heads and patches count from 0."""

from dataclasses import dataclass

from vitlens.arrays import Matrix, Pixels
from vitlens.record import OfModel, Record, arrays, col, head_name, table


@dataclass(frozen=True)
class IntervenedRow(OfModel):
    """One image with heads and patches off.

    target: the class predicted with everything on.
    predicted: the class predicted with heads and patches off.
    logit_before, logit_after: of the target, with everything on and with heads and patches off.
    method, title, signed: of the maps of the target.
    grid: rows and columns of the patches, None if none can be switched off.
    exact: True if replay was exact.
    note: the reason if it was not.
    """

    image: str = col("image")
    target: str = col("predicted with everything on")
    predicted: str = col("predicted then")
    logit_before: float = col("logit before")
    logit_after: float = col("logit after")
    method: str = col("method")
    title: str = col("map", unit="text")
    signed: bool = col("signed")
    grid: tuple[int, int] | None = col("rows and columns of patches")
    exact: bool = col("exact")
    note: str = col("note", unit="text")


@dataclass(frozen=True)
class HeadOffRow:
    """One head whose output was replaced by zero."""

    layer: int = col("layer")
    head: int = col("head")

    name = head_name


@dataclass(frozen=True)
class PatchOffRow:
    """One patch to which no token attended.

    key: its number among the tokens, the prefix included.
    """

    row: int = col("row")
    column: int = col("column")
    key: int = col("token")


@dataclass(frozen=True)
class ChangedClassRow:
    """One of the leading classes before a change and after it."""

    name: str = col("class")
    logit_before: float = col("logit before")
    logit_after: float = col("logit after")
    probability_before: float = col("probability before", unit="fraction")
    probability_after: float = col("probability after", unit="fraction")


@dataclass(frozen=True)
class IntervenedArrays:
    """The image, and the maps of the target.

    pixels: of the model's input (1, 3, height, width).
    before, after: raw (rows, columns), with everything on and with heads and patches off.
    """

    pixels: Pixels
    before: Matrix
    after: Matrix


@dataclass(frozen=True, kw_only=True)
class DemoRecord(Record):
    """Heads and patches that are off, and the effects on one image."""

    intervened: tuple[IntervenedRow, ...] = table()
    heads_off: tuple[HeadOffRow, ...] = table()
    patches_off: tuple[PatchOffRow, ...] = table()
    classes: tuple[ChangedClassRow, ...] = table()
    maps: IntervenedArrays | None = arrays("intervened")
