"""An image divided into the patches of a vision transformer."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.inputs import as_image
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import SMALL, TALL, WIDE, styled

_NUMBERED = 64  # number of patches up to which each is numbered


@styled
def patch_grid(*, image: ArrayLike, patch_size: int | tuple[int, int]) -> Figure:
    """An image (3, height, width) in [0, 1] beside the patches into which it is divided.

    patch_size: px, one number or (height, width). Patches are numbered from 0, row by row: each where there are at
    most 64, otherwise the first and last of the first and last row. Raises InputError when the patches do not fill the
    image.
    """
    picture = as_image(image)
    size = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    height, width = picture.shape[1:]
    if min(size) < 1 or height % size[0] or width % size[1]:
        raise InputError(f"expected a patch size that divides {height}x{width} px, found {size[0]}x{size[1]}")
    rows, columns = height // size[0], width // size[1]
    panel = min((WIDE - 0.3) / 2, (TALL - 0.8) * width / height)
    drawn = board(
        title="The input of a vision transformer: an image divided into patches, row by row",
        count=2,
        across=2,
        panel=(panel, panel * height / width),
        gap=(0.15, 0.0),
        margins=Margins(top=0.22),
    )
    whole, divided = drawn.panels
    for axes in drawn.panels:
        axes.imshow(enlarged(picture), extent=(0, columns, rows, 0), aspect="auto")
    without_frames(drawn.panels)
    whole.set_title(f"image: {height}×{width} px")
    divided.set_title(f"{rows}×{columns} = {rows * columns} patches of {size[0]}×{size[1]} px")
    divided.hlines(np.arange(1, rows), 0, columns, color="white", linewidth=2)
    divided.vlines(np.arange(1, columns), 0, rows, color="white", linewidth=2)
    for index in _numbered(rows, columns):
        y, x = divmod(index, columns)
        number = divided.text(x + 0.12, y + 0.12, str(index), ha="left", va="top", fontsize=SMALL - 1, color="white")
        number.set_path_effects([withStroke(linewidth=1.5, foreground="black")])
    return drawn.figure


def _numbered(rows: int, columns: int) -> list[int]:
    last = rows * columns - 1
    return list(range(last + 1)) if last < _NUMBERED else sorted({0, columns - 1, last - columns + 1, last})


def in_order(picture: NDArray[np.floating], order: Sequence[int], grid: tuple[int, int]) -> NDArray[np.floating]:
    """An image (3, height, width) with its patches in another order; pixels that the patches do not cover are cut."""
    height, width = picture.shape[1] // grid[0], picture.shape[2] // grid[1]
    covered = picture[:, : grid[0] * height, : grid[1] * width]
    patches = covered.reshape(3, grid[0], height, grid[1], width).transpose(1, 3, 0, 2, 4).reshape(-1, 3, height, width)
    moved = patches[np.asarray(order)].reshape(*grid, 3, height, width)
    return np.asarray(moved.transpose(2, 0, 3, 1, 4).reshape(covered.shape))
