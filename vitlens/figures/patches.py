"""An image cut into the patches that the model reads."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_image
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import SMALL, WIDE, bare, heading, sheet, styled

_NUMBERED = 64  # patches up to which each bears its number


@styled
def patch_grid(*, image: ArrayLike, patch_size: int | tuple[int, int]) -> Figure:
    """An image (3, height, width) in [0, 1] beside the patches it is cut into.

    patch_size: px, one number or (height, width). Patches are numbered from 1, row by row: each where there are at
    most 64, else the first and last of the first and last row. Raises InputError when the patches do not fill the
    image.
    """
    picture = as_image(image)
    size = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    height, width = picture.shape[1:]
    if min(size) < 1 or height % size[0] or width % size[1]:
        raise InputError(f"expected a patch size that divides {height}x{width} px, found {size[0]}x{size[1]}")
    rows, columns = height // size[0], width // size[1]
    panel = (WIDE - 0.2) / 2
    figure = sheet(WIDE, panel * height / width + 0.2)
    whole, apart = figure.subplots(1, 2)
    whole.imshow(enlarged(picture))
    whole.set_title(f"image: {height}×{width} px")
    cut, tile = _taken_apart(enlarged(picture), rows, columns)
    apart.imshow(cut)
    apart.set_title(f"{rows}×{columns} = {rows * columns} patches of {size[0]}×{size[1]} px")
    for index in _numbered(rows, columns):
        y, x = divmod(index, columns)
        where = (x + 0.5) * tile[1], (y + 0.5) * tile[0]
        apart.text(*where, str(index + 1), ha="center", va="center", fontsize=SMALL - 1, bbox=_PLATE)
    bare([whole, apart])
    heading(figure, "What a vision transformer reads: an image cut into patches, row by row")
    return figure


_PLATE = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}


def _numbered(rows: int, columns: int) -> list[int]:
    last = rows * columns - 1
    return list(range(last + 1)) if last < _NUMBERED else sorted({0, columns - 1, last - columns + 1, last})


def _taken_apart(pixels: Array, rows: int, columns: int) -> tuple[Array, tuple[float, float]]:
    """Patches of (height, width, 3) set apart on white, and the height and width of one with its gap."""
    height, width = pixels.shape[0] // rows, pixels.shape[1] // columns
    gap = max(1, min(height, width) // 6)
    canvas = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap, 3))
    for y, x in np.ndindex(rows, columns):
        top, left = y * (height + gap), x * (width + gap)
        canvas[top : top + height, left : left + width] = pixels[y * height :, x * width :][:height, :width]
    return canvas, (height + gap, width + gap)
