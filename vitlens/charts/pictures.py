"""Charts of images: photographs in rows and columns, with maps over them or without."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion

from vitlens.charts.values import Draw
from vitlens.figures.board import BAR_ROOM, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.overlay import OPACITY, Scale, blend, colour_bar, enlarged, is_constant, joint_scale
from vitlens.figures.overlays import mark_peak, outline
from vitlens.figures.style import (
    MAGNITUDE,
    RIGHT,
    RIGHT_SYMBOL,
    SMALL,
    WIDE,
    WRONG,
    WRONG_SYMBOL,
    drawable,
    shortened,
    styled,
)
from vitlens.report.numbers import percent

_LARGEST: Final = 1.35  # inch of a picture
_LEAST: Final = 0.8
_ROUND: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256)
_TALL: Final = 6.0  # of all rows


@dataclass(frozen=True)
class Picture:
    """A cell of `images`. image (3, height, width) in [0, 1]; map (rows, columns) that is drawn over it; row, column:
    their names; below: a line under it; frame: the colour around it; mask (height, width): of an object, outlined;
    hit: whether the map's highest point, which is marked, lies on it; crossed: why the map says nothing, crossed out;
    sheet: the number of its figure, where there are several.
    """

    image: NDArray[np.floating] | None
    map: NDArray[np.floating] | None = None
    row: str = ""
    column: str = ""
    below: str = ""
    frame: str = ""
    mask: NDArray[np.bool_] | None = None
    hit: bool | None = None
    crossed: str = ""
    sheet: int = 0

    @classmethod
    def predicted(
        cls, image: NDArray[np.floating], prediction: str, probability: float, label: str | None, *, row: str = ""
    ) -> "Picture":
        """An image with its prediction below, marked by colour and symbol as right or wrong, where a label is known."""
        words = f"{shortened(prediction, 16)}, {percent(probability)}"
        words = words if len(words) <= 16 else words.replace(", ", "\n", 1)
        if label is None:
            return cls(image, below=words, row=row)
        if prediction == label:
            return cls(image, below=f"{RIGHT_SYMBOL} {words}", frame=RIGHT, row=row)
        return cls(image, below=f"{WRONG_SYMBOL} {words}\nis {shortened(label, 16)}", frame=WRONG, row=row)


def images(
    *, scale: Literal["own", "joint"] = "own", label: str = "", smooth: bool = True, largest: float = _LARGEST
) -> Draw:
    """Pictures by row and column. scale: each map from 0 to its own maximum, or all on one, whose bar has the label;
    largest: side of a picture, inch, where there is room."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        down = list(dict.fromkeys(each.row for each in rows))
        across = list(dict.fromkeys(each.column for each in rows))
        if len(down) > 1 and across == [""]:  # the pictures of a row beside one another
            before = dict.fromkeys(down, 0)
            places = {}
            for each in rows:
                places[id(each)] = down.index(each.row), before[each.row]
                before[each.row] += 1
            shape = (len(down), max(before.values()))
        elif len(down) == 1 and len(across) == 1:  # pictures without places
            count = len(rows)
            columns = min(count, 6)
            places = {id(each): divmod(at, columns) for at, each in enumerate(rows)}
            shape = (-(-count // columns), columns)
        else:
            places = {id(each): (down.index(each.row), across.index(each.column)) for each in rows}
            shape = (len(down), len(across))
        maps = [np.ravel(each.map) for each in rows if each.map is not None]  # their grids may differ
        joint = joint_scale(np.concatenate(maps)[None, None]) if maps and scale == "joint" else None
        named = any(each.row for each in rows)
        beside = {name: textwrap.fill(shortened(name, 40), 14) for name in down}
        left = 0.12 + 0.075 * max(len(line) for text in beside.values() for line in text.split("\n")) if named else 0.06
        right = BAR_ROOM if joint else 0.06
        most = max(_LARGEST, min(largest, _TALL / shape[0]))
        side = float(np.clip((WIDE - left - right) / shape[1] - 0.06, _LEAST, most))
        text = 0.14 * max((each.below.count("\n") + 1 if each.below else 0 for each in rows), default=0) + 0.05
        heads = {name: textwrap.fill(shortened(name, 40), max(8, int(side / 0.07))) for name in across}
        above = 0.1 + 0.14 * max(text.count("\n") + 1 for text in heads.values()) if any(across) else 0.05
        margins = Margins(left=left, right=right, top=above, bottom=text + 0.05)
        drawn = board(
            title=title, count=shape[0] * shape[1], across=shape[1], panel=(side, side), gap=(0.06, text),
            margins=margins,
        )  # fmt: skip
        without_frames(drawn.panels)
        for axes in drawn.panels:
            axes.set_visible(False)
        for each in rows:
            at = places[id(each)]
            axes = drawn.panels[at[0] * shape[1] + at[1]]
            axes.set_visible(True)
            axes.imshow(_pixels(each, joint, smooth), aspect="equal", interpolation="nearest")
            if each.crossed:
                cross_out(axes, each.crossed)
            if each.mask is not None:
                outline(axes, np.asarray(each.mask, float))
            if each.map is not None and each.hit is not None:
                mark_peak(axes, np.asarray(each.map, float), hit=each.hit)
            if each.frame:
                axes.spines[:].set(visible=True, color=each.frame, linewidth=2.0)
            if each.below:
                axes.set_xlabel(drawable(each.below), fontsize=SMALL, labelpad=2)
            if at[0] == 0 and each.column:
                axes.set_title(heads[each.column])
            if at[1] == 0 and each.row:
                axes.set_ylabel(beside[each.row], rotation=0, ha="right", va="center")
        if joint:
            colour_bar(drawn.bar(), scale=joint, label=label)
        return drawn.figure

    return draw


def pixels(picture: Picture) -> NDArray[np.uint8]:
    """A picture alone, (height, width, 3), with its object outlined in white, for a page of panels one by one."""
    drawn = _pixels(picture, None, True)
    if picture.mask is not None:
        times = drawn.shape[0] // picture.mask.shape[0]
        inside = np.asarray(picture.mask, bool).repeat(times, 0).repeat(times, 1)
        drawn[inside & ~binary_erosion(inside, iterations=2)] = 1.0
    return np.asarray(np.round(np.clip(drawn, 0, 1) * 255), np.uint8)


def amplification(changes: NDArray[np.floating]) -> int:
    """The greatest round factor at which every perturbation, drawn around mid-grey, stays within the range of colours;
    at least 1."""
    largest = float(np.abs(changes).max(initial=0.0))
    fitting = [factor for factor in _ROUND if factor * largest <= 0.5 * 1.001] if largest > 0 else []
    return max(fitting, default=1)


def _pixels(each: Picture, joint: Scale | None, smooth: bool) -> NDArray[np.floating]:
    if each.map is None:
        return np.ones((1, 1, 3)) if each.image is None else enlarged(np.asarray(each.image, float))
    values = np.asarray(each.map, float)
    own = joint or Scale(min(0.0, float(values.min())), float(values.max()) or 1.0)
    if each.image is None:
        return np.asarray(colormaps[MAGNITUDE](own.norm(values)))[..., :3]
    return blend(each.image, values, scale=own, smooth=smooth, opacity=0.0 if is_constant(values) else OPACITY)
