"""Attribution maps of an image by several methods, side by side.

Methods have different units, so each map is drawn as a share of its largest values. Signs are kept: red is evidence for
the class, blue against it; where a map is 0 the grey image is visible. A map without signs begins at its least value.
"""

import textwrap
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, PHOTOGRAPHS, Board, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import Scale, colour_bar, enlarged, is_constant, upsample
from vitlens.figures.overlays import outline
from vitlens.figures.style import SIGNED, SMALL, TALL, WIDE, styled

ACROSS: Final = 7  # most panels side by side; more are divided into lines
LARGEST: Final = 99.5  # percentile of a map's absolute values from which it has the full colour
_OPACITY = 0.85  # of the full colour over the grey image
_LINE = 0.13  # inch per line of small letters
_LETTER = 0.064  # inch per letter
_LEAST = 0.45  # inch, the narrowest legible panel
_PLATE: Final = {"facecolor": "white", "alpha": 0.8, "linewidth": 0.0, "pad": 1.5}


def lines_of(panels: int) -> int:
    """The number of lines of one image with this many panels, the input among them."""
    return -(-panels // ACROSS)


@styled
def attribution_overlays(
    *,
    images: ArrayLike,
    maps: Sequence[ArrayLike],
    signed: Sequence[bool],
    titles: Sequence[str],
    names: Sequence[str],
    title: str,
    masks: ArrayLike | None = None,
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], each followed by its attribution by each method.

    maps: for each method (batch, rows, columns) in its own resolution, raw and signed; one that is constant or not
    finite is not drawn, and its panel says so. signed: whether a method's values have signs; titles: the methods;
    names: one per image; masks: (batch, height, width), outlined. Raises InputError when shapes do
    not fit.
    """
    pictures = as_images(images)
    require_length(len(titles), len(maps), name="titles", of="the methods")
    require_length(len(signed), len(maps), name="signs", of="the methods")
    require_length(len(names), len(pictures), name="names", of="the images")
    for of_method in maps:
        require_length(len(np.asarray(of_method)), len(pictures), name="maps of a method", of="the images")
    outlines = None if masks is None else as_array(masks, name="masks", axes=("batch", "height", "width"))
    if outlines is not None and outlines.shape != pictures[:, 0].shape:
        raise InputError(f"expected masks of shape {pictures[:, 0].shape}, found {outlines.shape}")
    drawn, cells = _board(title, len(pictures), titles, pictures.shape[2] / pictures.shape[3], names)
    for index, picture in enumerate(pictures):
        own = cells[index]
        own[0].imshow(enlarged(picture))
        _title(own[0], "input")
        own[0].annotate(
            "\n".join(_wrapped(names[index], _row_letters(drawn))), (0.0, 0.0), (0.0, -3.0), fontsize=SMALL, va="top",
            xycoords="axes fraction", textcoords="offset points", linespacing=1.0,
        )  # fmt: skip
        for axes, own_maps, method, two_sided in zip(own[1:], maps, titles, signed):
            pixels, flaw = _overlay(picture, np.asarray(own_maps, dtype=np.float64)[index], signed=two_sided)
            axes.imshow(pixels)
            _title(axes, method)
            axes.text(0.5, 0.5, flaw, fontsize=SMALL, ha="center", va="center", transform=axes.transAxes, bbox=_PLATE)
        if outlines is not None:
            for axes in own:
                outline(axes, outlines[index])
    without_frames(drawn.panels)
    colour_bar(drawn.bar(), scale=Scale(-1.0, 1.0, clipped=True), label="share of its largest", colours=SIGNED)
    return drawn.figure


def _overlay(picture: Array, values: Array, *, signed: bool) -> tuple[Array, str]:
    """The grey image with a map over it and ""; or the grey image alone and the fault of the map."""
    pixels = enlarged(picture)
    grey = np.repeat((pixels @ np.array([0.2126, 0.7152, 0.0722]))[..., None], 3, axis=2)
    if not np.isfinite(values).all():
        return grey, "not finite"
    if is_constant(values):
        return grey, "all equal"
    values = values if signed else values - values.min()
    most = float(np.percentile(np.abs(values), LARGEST)) or float(np.abs(values).max())
    shares = upsample(np.clip(values / most, -1, 1), grey.shape[:2])
    colours = colormaps[SIGNED](0.5 + shares / 2)[..., :3]
    weight = _OPACITY * np.abs(shares)[..., None]
    return np.asarray((1 - weight) * grey + weight * colours), ""


def _board(
    title: str, batch: int, titles: Sequence[str], ratio: float, names: Sequence[str]
) -> tuple[Board, list[list[Axes]]]:
    """The board and, for each image, its panels: the input and one per method."""
    panels = 1 + len(titles)
    lines = lines_of(panels)
    across = -(-panels // lines)
    width = min((WIDE - BAR_ROOM - 0.06) / across - 0.07, (PHOTOGRAPHS / (batch * lines * across * ratio)) ** 0.5, 1.7)
    below = _LINE * max(len(_wrapped(word, int(across * width / _LETTER))) for word in names) + 0.06
    while True:  # titles need more lines over narrower panels
        letters = max(8, int(width / _LETTER))
        above = _LINE * max(len(_wrapped(word, letters, whole=True)) for word in titles) + 0.06
        fits = ((TALL - 0.7) / (batch * lines) - above - below) / ratio
        if width <= max(fits, _LEAST):
            break
        width = max(width - 0.02, _LEAST)
    drawn = board(
        title=title,
        count=batch * lines * across,
        across=across,
        panel=(width, width * ratio),
        gap=(0.07, above + below),
        margins=Margins(right=BAR_ROOM, top=above, bottom=below),
    )
    cells = []
    for index in range(batch):
        own = drawn.panels[index * lines * across : (index + 1) * lines * across]
        for axes in own[panels:]:
            axes.set_axis_off()
        cells.append(own[:panels])
    return drawn, cells


def _title(axes: Axes, above: str) -> None:
    width = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    axes.set_title("\n".join(_wrapped(above, max(8, int(width / _LETTER)), whole=True)), fontsize=SMALL, pad=2)


def _row_letters(drawn: Board) -> int:
    """The number of letters in the width of all panels of a line."""
    return int((drawn.right - drawn.left) / _LETTER)


def _wrapped(words: str, letters: int, *, whole: bool = False) -> list[str]:
    """Words in at most three lines, no break between a number and its % sign; whole: no word is divided."""
    unbroken = words.replace(" %", "\u00a0%")
    return textwrap.wrap(unbroken, letters, max_lines=3, placeholder="…", break_long_words=not whole) or [""]
