"""What the picture of a transformer shows of its layers."""

from dataclasses import dataclass

from vitlens.charts.overlay import Array
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class HeadView:
    """One head of a layer.

    head: its number.
    map: (rows, columns), its attention on the image.
    distance: its attention distance as a share of that of uniform attention.
    lost: percentage points of accuracy lost without it.
    matters: True if the loss changes significantly without it.
    """

    head: int
    map: Array | None = None
    distance: float | None = None
    lost: Estimate | None = None
    matters: bool = False


@dataclass(frozen=True)
class Exemplar:
    """An image that a head helps most.

    image: (3, height, width).
    patch: (row, column) of the patch through which the head adds most, None if it is not known.
    grid: (rows, columns) of patches.
    """

    image: Array
    patch: tuple[int, int] | None = None
    grid: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class RoleView:
    """The role of one head of a layer.

    head: the number of the head.
    helps: the labels of the images that it helps most.
    words: the head's label.
    tested: True if the label is tested.
    exemplars: the images that it helps most.
    """

    head: int
    helps: tuple[str, ...]
    words: str
    tested: bool
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True)
class LayerView:
    """One layer.

    layer: its number.
    stage: the name of its stage.
    heads: its heads, the most important first.
    lens: accuracy of the logit lens after it.
    role: the role of one of its heads.
    """

    layer: int
    stage: str
    heads: tuple[HeadView, ...]
    lens: Estimate | None = None
    role: RoleView | None = None
