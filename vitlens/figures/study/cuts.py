"""One image cut into the patches of several models, and under each cut what it costs and reaches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.inputs import as_image
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import SMALL, WIDE, shortened, styled

_ACROSS = 4  # panels of a row, whose width leaves room for the text under each; fewer are no larger
_LINE = 0.15  # inch of height of a line of text


@dataclass(frozen=True)
class Cut:
    """One point: its name, its grid of patches (rows, columns), and the lines of text under its panel."""

    name: str
    grid: tuple[int, int]
    lines: Sequence[str]


@styled
def image_cuts(*, image: ArrayLike, cuts: Sequence[Cut], title: str) -> Figure:
    """An image (3, height, width) in [0, 1] once for each cut, divided into its patches by white lines.

    Raises InputError for no cut, and for a grid that does not divide the image.
    """
    picture = as_image(image)
    height, width = picture.shape[1:]
    if not cuts:
        raise InputError("expected at least one way to cut the image, found none")
    for cut in cuts:
        if min(cut.grid) < 1 or height % cut.grid[0] or width % cut.grid[1]:
            raise InputError(f"expected a grid that divides {height}x{width} px, found {cut.grid[0]}x{cut.grid[1]}")
    wide, text = (WIDE - 0.12 * (_ACROSS + 1)) / _ACROSS, _LINE * max(len(cut.lines) for cut in cuts)
    drawn = board(
        title=title,
        count=len(cuts),
        across=min(_ACROSS, len(cuts)),
        panel=(wide, wide * height / width),
        gap=(0.12, 0.3 + text),
        margins=Margins(left=0.12, right=0.12, top=0.24, bottom=text + 0.12),
    )
    for axes, cut in zip(drawn.panels, cuts):
        rows, columns = cut.grid
        axes.imshow(enlarged(picture), extent=(0, columns, rows, 0), aspect="auto")
        thick = float(np.clip(10 / max(rows, columns), 0.4, 2))
        axes.hlines(np.arange(1, rows), 0, columns, color="white", linewidth=thick)
        axes.vlines(np.arange(1, columns), 0, rows, color="white", linewidth=thick)
        axes.set_title(shortened(cut.name, 26))
        axes.text(0.5, -0.04, "\n".join(cut.lines), transform=axes.transAxes, ha="center", va="top", fontsize=SMALL)
    without_frames(drawn.panels)
    return drawn.figure
