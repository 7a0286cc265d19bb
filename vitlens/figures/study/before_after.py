"""Maps of a model before and after training, side by side on the same images, with their signed difference."""

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import Board, Margins, board, without_frames
from vitlens.figures.inputs import as_array, as_images, require_length
from vitlens.figures.overlay import blend, colour_bar, draw_map, enlarged, joint_scale
from vitlens.figures.signed import draw_signed, symmetric_scale
from vitlens.figures.style import SIGNED, SMALL, TALL, WIDE, shortened, styled

_COLUMNS: Final = 4
_WORDS: Final = 0.34  # inch below a picture for two lines of names
_SIDE: Final = 0.22  # inch beside all, for the numbers at the ends of the colour bars
_BARS: Final = 0.75  # inch below all for the colour bars


@styled
def before_and_after(
    *,
    images: ArrayLike,
    before: ArrayLike,
    after: ArrayLike,
    means: tuple[ArrayLike, ArrayLike] | None,
    names: Sequence[tuple[str, str, str]],
    n: int,
    label: str,
    title: str,
) -> Figure:
    """Rows of an image, its map before, after, and after minus before; a last row with means over many images.

    images: (batch, 3, height, width) in [0, 1]; before, after: (batch, rows, columns), with one scale of colours;
    means: of n images, (rows, columns) before and after, or None; names: of each image its class and both predictions;
    label: the unit of the maps. Differences have one symmetric scale. Raises InputError where shapes do not fit.
    """
    pictures = as_images(images)
    first, second = (
        as_array(maps, name=name, axes=("batch", "rows", "columns"))
        for maps, name in ((before, "maps before"), (after, "maps after"))
    )
    if first.shape != second.shape:
        raise InputError(f"expected maps of one shape, found {first.shape} and {second.shape}")
    for each, name in ((first, "maps"), (names, "names")):
        require_length(len(each), len(pictures), name=name, of="the images")
    overall = [as_array(each, name="mean map", axes=("rows", "columns")) for each in means or ()]
    scale = joint_scale([*first, *second])
    differences = [*(second - first), *([overall[1] - overall[0]] if overall else [])]
    signed = symmetric_scale(differences)
    drawn = _board(title, len(differences), pictures.shape[2] / pictures.shape[3])
    for row, picture in enumerate(pictures):
        cells = drawn.panels[_COLUMNS * row : _COLUMNS * (row + 1)]
        cells[0].imshow(enlarged(picture))
        for axes, values in ((cells[1], first[row]), (cells[2], second[row])):
            axes.imshow(blend(picture, values, scale=scale))
        draw_signed(cells[3], second[row] - first[row], signed)
        for axes, name in zip(cells, names[row], strict=False):
            axes.set_xlabel(shortened(name, 24), fontsize=SMALL, labelpad=2)
    if overall:
        for axes, values in zip(drawn.panels[-3:-1], overall, strict=True):
            draw_map(axes, values, scale=scale)
        draw_signed(drawn.panels[-1], differences[-1], signed)
        for axes in drawn.panels[-3:]:
            axes.set_xlabel(f"mean, n = {n}", fontsize=SMALL, labelpad=2)
    without_frames(drawn.panels)
    for axes, name in zip(drawn.panels, ("image", "before", "after", "difference"), strict=False):
        axes.set_title(name)
    left, right = _bars(drawn)
    colour_bar(left, scale=scale, label=label, place="horizontal")
    colour_bar(right, scale=signed, label="after minus before", colours=SIGNED, both=True, place="horizontal")
    return drawn.figure


def _board(title: str, rows: int, ratio: float) -> Board:
    gap = (0.2, _WORDS)
    across = (WIDE - 2 * _SIDE) / _COLUMNS - gap[0]
    width = min(across, ((TALL - 1.2 - _BARS) / rows - gap[1]) / ratio, 1.4)
    margins = Margins(left=_SIDE, right=_SIDE, top=0.24, bottom=_WORDS + _BARS)
    size = (width, width * ratio)
    return board(title=title, count=_COLUMNS * rows, across=_COLUMNS, panel=size, gap=gap, margins=margins)


def _bars(drawn: Board) -> tuple[Axes, Axes]:
    """Places for two horizontal colour bars below the panels."""
    wide, height = (drawn.right - drawn.left - 0.4) / 2, 0.11
    top = drawn.bottom + _WORDS + 0.05
    return (
        drawn.place(drawn.left, top, wide, height),
        drawn.place(drawn.left + wide + 0.4, top, wide, height),
    )
