"""How attention develops: the head-averaged map of every layer beside the rollout up to it, one image a row."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import blend, joint_scale
from vitlens.figures.style import SMALL, TALL, WIDE, heading, sheet, styled

_SIDE = 112  # pixels of one panel
_GAP = 6  # white pixels between panels
_BETWEEN = 22  # between the three groups of columns


@styled
def development(
    *, images: ArrayLike, attention: ArrayLike, rollout: ArrayLike, numbers: Sequence[int], title: str
) -> Figure:
    """One row an image: the image, attention (batch, layers, rows, columns) by layer, and the rollout up to each layer.

    images: (batch, 3, height, width) in [0, 1]; numbers: of the layers in the model, from 0. Each map has its own
    colours, from its least value to its greatest, as only their places are to be compared. Raises InputError for other
    shapes.
    """
    pictures = as_images(images)
    groups = [
        as_array(maps, name=name, axes=("batch", "layers", "rows", "columns"))
        for name, maps in (("attention", attention), ("rollout", rollout))
    ]
    for name, maps in zip(("attention", "rollout"), groups):
        require_length(len(maps), len(pictures), name=name, of="the images")
        require_length(maps.shape[1], len(numbers), name=f"layers of {name}", of="numbers")
    rows = [_row(picture, [maps[index] for maps in groups]) for index, picture in enumerate(pictures)]
    canvas = np.concatenate(rows, 0)
    width = WIDE
    figure = sheet(width, min(width * canvas.shape[0] / canvas.shape[1] + 0.35, TALL))
    axes = figure.add_subplot()
    axes.imshow(canvas, aspect="equal", interpolation="nearest")
    axes.set_axis_off()
    step, start = _SIDE + _GAP, _SIDE + _BETWEEN
    axes.text(_SIDE / 2, -8, "image", ha="center", va="bottom", fontsize=SMALL)
    for group, word in enumerate(("L", "to L")):
        begin = start + group * (len(numbers) * step - _GAP + _BETWEEN)
        for place, number in enumerate(numbers):
            text = f"{word}{number}" if word == "L" or place == 0 else f"L{number}"
            axes.text(begin + place * step + _SIDE / 2, -8, text, ha="center", va="bottom", fontsize=SMALL)
    heading(figure, title)
    return figure


def _row(picture: Array, groups: Sequence[Array]) -> Array:
    """One image and its maps side by side, as pixels (height, width, 3)."""
    shown = _resized(np.moveaxis(picture, 0, 2))
    parts = [shown, _white(_BETWEEN)]
    for index, maps in enumerate(groups):
        parts += [_white(_BETWEEN)] if index else []
        for place, values in enumerate(maps):
            parts += [_white(_GAP)] if place else []
            parts.append(_resized(blend(picture, values, scale=joint_scale(values[None]))))
    return np.concatenate([np.concatenate(parts, 1), np.ones((_GAP, sum(part.shape[1] for part in parts), 3))], 0)


def _white(width: int) -> Array:
    return np.ones((_SIDE, width, 3))


def _resized(pixels: Array) -> Array:
    """Pixels (height, width, 3) at the panel's size, nearest."""
    rows = (np.arange(_SIDE) * pixels.shape[0] // _SIDE).astype(int)
    columns = (np.arange(_SIDE) * pixels.shape[1] // _SIDE).astype(int)
    resized: Array = pixels[rows][:, columns]
    return resized
