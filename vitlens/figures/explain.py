"""Attribution maps of images by several methods, side by side.

Methods have different units, so each map is drawn as a share of its largest values. Signs are kept: red is evidence for
the class, blue against it; where a map is 0 the grey image is visible. A map without signs begins at its least value.
"""

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import PHOTOGRAPHS, Board, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import Scale, colour_bar, enlarged, is_constant, upsample
from vitlens.figures.overlays import outline
from vitlens.figures.style import SIGNED, SMALL, TALL, VERMILLION, WIDE, styled

ACROSS: Final = 8  # most panels in a row that are legible on a page; further methods are for another figure
LARGEST: Final = 99.5  # percentile of a map's absolute values from which it has the full colour
OPACITY: Final = 0.85  # of the full colour over the grey image
_LINE = 0.13  # inch per line of small letters
_LETTER = 0.064  # inch per letter
_GAP = 0.07  # inch between panels
_WIDEST = 1.7  # inch, of a panel
_LEAST = 0.45  # inch, the narrowest legible panel
_BAR = 0.62  # inch below the panels, for the colour bar with its numbers and label


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
    failed: Sequence[str] | None = None,
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], a row each, followed by their attribution by each method.

    maps: for each method (batch, rows, columns) in its own resolution, raw and signed; signed: whether a method's
    values have signs; titles: the methods, above the first row; names: one per image, below it; masks: (batch, height,
    width), outlined; failed: for each method why its maps may not be trusted, in a few words, "" where they may. A map
    that is uniform or not finite is not drawn: its panel is crossed out and says so, and the maps of a failed method
    are drawn crossed out, with the reason below its name. More than ACROSS - 1 methods are divided into blocks of
    columns, one below the other. Raises InputError when shapes do not fit.
    """
    pictures = as_images(images)
    reasons = failed or [""] * len(maps)
    for found, name in ((titles, "titles"), (signed, "signs"), (reasons, "reasons")):
        require_length(len(found), len(maps), name=name, of="the methods")
    require_length(len(names), len(pictures), name="names", of="the images")
    for of_method in maps:
        require_length(len(np.asarray(of_method)), len(pictures), name="maps of a method", of="the images")
    outlines = None if masks is None else as_array(masks, name="masks", axes=("batch", "height", "width"))
    if outlines is not None and outlines.shape != pictures[:, 0].shape:
        raise InputError(f"expected masks of shape {pictures[:, 0].shape}, found {outlines.shape}")
    drawn, blocks = _panels(title, pictures, titles, reasons, names)
    for columns, rows in blocks:
        chosen = [(maps[index], signed[index], reasons[index]) for index in columns]
        for index, (picture, (first, *others)) in enumerate(zip(pictures, rows, strict=True)):
            first.imshow(enlarged(picture))
            _below(first, names[index], drawn)
            for axes, (own_maps, two_sided, reason) in zip(others, chosen, strict=True):
                pixels, flaw = overlaid(picture, np.asarray(own_maps, dtype=np.float64)[index], signed=two_sided)
                axes.imshow(pixels)
                if flaw or reason:
                    cross_out(axes, flaw)
            for axes in (first, *others) if outlines is not None else ():
                outline(axes, np.asarray(outlines)[index])
            without_frames((first, *others))
        heads = [("input", ""), *((titles[index], reasons[index]) for index in columns)]
        for axes, head in zip(rows[0], heads, strict=True):
            _header(axes, *head)
    long = min(drawn.right - drawn.left, 3.2)
    bar = drawn.place((drawn.left + drawn.right - long) / 2, drawn.figure.get_figheight() - _BAR + 0.08, long, 0.09)
    scale, label = Scale(-1.0, 1.0, clipped=True), "share of the map's largest value"
    colour_bar(bar, scale=scale, label=label, colours=SIGNED, both=True, place="horizontal")
    return drawn.figure


def overlaid(picture: Array, values: Array, *, signed: bool, opacity: float = OPACITY) -> tuple[Array, str]:
    """Pixels (height, width, 3) of a map (rows, columns) over a picture (3, height, width) in grey, and "".

    A map that is uniform or not finite is not drawn: the grey picture alone, and the fault. opacity: of the largest
    values. Raises InputError when it is not in [0, 1].
    """
    if not 0 <= opacity <= 1:
        raise InputError(f"expected opacity in [0, 1], found {opacity}")
    pixels = enlarged(picture)
    grey = np.repeat((pixels @ np.array([0.2126, 0.7152, 0.0722]))[..., None], 3, axis=2)
    if not np.isfinite(values).all():
        return grey, "not finite"
    if is_constant(values):
        return grey, "uniform"
    values = values if signed else values - values.min()
    most = float(np.percentile(np.abs(values), LARGEST)) or float(np.abs(values).max())
    shares = upsample(np.clip(values / most, -1, 1), grey.shape[:2])
    colours = colormaps[SIGNED](0.5 + shares / 2)[..., :3]
    weight = opacity * np.abs(shares)[..., None]
    return np.asarray((1 - weight) * grey + weight * colours), ""


def _panels(
    title: str, pictures: Array, titles: Sequence[str], reasons: Sequence[str], names: Sequence[str]
) -> tuple[Board, list[tuple[range, list[list[Axes]]]]]:
    """The board, and its blocks: the methods of each, and for each image a row of panels, the input's first."""
    batch, ratio = len(pictures), pictures.shape[2] / pictures.shape[3]
    count = max(1, -(-len(titles) // (ACROSS - 1)))
    edges = [round(len(titles) * part / count) for part in range(count + 1)]
    blocks = [range(start, stop) for start, stop in pairwise(edges)]
    across, down = 1 + max(map(len, blocks)), count * batch
    room = (WIDE - 0.12 + _GAP) / across - _GAP
    width = min(room, (PHOTOGRAPHS / (down * across * ratio)) ** 0.5, _WIDEST / max(1.0, ratio))
    while True:  # names need more lines over narrower panels
        heads = (_head(name, reason, width) for name, reason in zip(titles, reasons, strict=True))
        above = _LINE * max(map(len, heads), default=1) + 0.06
        below = _LINE * max(len(_wrapped(word, _letters(across * (width + _GAP)))) for word in names) + 0.08
        fits = ((TALL - 0.4 - _BAR - count * above) / down - below) / ratio
        if width <= max(fits, _LEAST):
            break
        width = max(width - 0.02, _LEAST)
    row = width * ratio + below
    tall = count * (above + batch * row)
    margins = Margins(top=0.0, bottom=tall + _BAR)
    drawn = board(title=title, count=0, across=across, panel=(width, 0.0), gap=(_GAP, 0.0), margins=margins)
    panels: list[tuple[range, list[list[Axes]]]] = []
    for place, columns in enumerate(blocks):
        top = drawn.top + place * (above + batch * row) + above
        lines = [
            [
                drawn.place(drawn.left + column * (width + _GAP), top + line * row, width, width * ratio)
                for column in range(1 + len(columns))
            ]
            for line in range(batch)
        ]
        panels.append((columns, lines))
    return drawn, panels


def _letters(width: float) -> int:
    return max(8, int(width / _LETTER))


def _head(name: str, reason: str, width: float) -> list[str]:
    """The lines above a column: the name of the method, and why its maps failed."""
    return [
        *_wrapped(name, _letters(width), whole=True),
        *(_wrapped(reason, _letters(width), whole=True) * bool(reason)),
    ]


def _header(axes: Axes, name: str, reason: str) -> None:
    """Write the name of a method above its column, and between the two why its maps failed."""
    width = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    lines = _wrapped(reason, _letters(width), whole=True) if reason else []
    rise = 2.0 + (1.0 + 8.4 * len(lines) if lines else 0.0)  # points
    style: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "center",
        "fontsize": SMALL,
    }
    words = "\n".join(_wrapped(name, _letters(width), whole=True))
    axes.annotate(words, (0.5, 1.0), (0.0, rise), va="bottom", linespacing=1.0, **style)
    if lines:
        axes.annotate("\n".join(lines), (0.5, 1.0), (0.0, 2.0), va="bottom", linespacing=1.0, color=VERMILLION, **style)


def _below(axes: Axes, name: str, drawn: Board) -> None:
    """Write an image's name below its row, as wide as the row."""
    words = "\n".join(_wrapped(name, _letters(drawn.right - drawn.left)))
    axes.annotate(
        words, (0.0, 0.0), (0.0, -3.0), fontsize=SMALL, va="top", xycoords="axes fraction",
        textcoords="offset points", linespacing=1.0,
    )  # fmt: skip


def _wrapped(words: str, letters: int, *, whole: bool = False) -> list[str]:
    """Words in at most three lines, no break between a number and its % sign; whole: no word is divided."""
    unbroken = words.replace(" %", "\u00a0%")
    return textwrap.wrap(unbroken, letters, max_lines=3, placeholder="…", break_long_words=not whole) or [""]
