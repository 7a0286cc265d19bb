"""The windows of a windowed model, as rows and arrays; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, TableOf


@dataclass(frozen=True)
class WindowRow:
    """One layer in windows.

    map, window, shift: (rows, columns) of patches; windows: their number; parts: sets of patches that attend to the
    same patches; padding: places without a patch; pairs: ordered pairs of patches that meet; new: of them those that do
    not meet in the layer before (None: none before on this map); reach: patches of its stage's first map on which one
    patch depends, mean over patches; patch: the one whose reach the arrays hold.
    """

    layer: int
    map: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    windows: int
    parts: int
    padding: int
    pairs: int
    new: int | None
    reach: float
    patch: tuple[int, int]


@dataclass(frozen=True)
class WindowArrays:
    """By row of the table of windows: part (rows, columns), the part of each patch; reach (rows, columns), the patches
    on which the row's patch depends; mask (places, places), query by key, of the last window."""

    part: Annotated[Mapping[int, NDArray[np.integer]], Form("iu", (None, None))]
    reach: Annotated[Mapping[int, NDArray[np.bool_]], Form("b", (None, None))]
    mask: Annotated[Mapping[int, NDArray[np.bool_]], Form("b", (None, None))]


WINDOWS = TableOf("windows", WindowRow, optional=True)
WINDOW_MAPS = ArraysOf("windows", WindowArrays)
