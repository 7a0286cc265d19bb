"""One image a row: the image, and where the evidence for the predicted class and for the runner-up lies."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.board import BAR_ROOM, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_images, require_length
from vitlens.figures.overlay import Scale, blend, colour_bar, enlarged, is_constant
from vitlens.figures.style import SMALL, TALL, WIDE, styled

_LINE = 0.13  # inch per line of small letters
_LETTER = 0.064  # inch per letter


@styled
def look_rows(*, images: ArrayLike, maps: Sequence[ArrayLike], captions: Sequence[Sequence[str]], title: str) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], each followed by its maps, each map as a share of its largest value.

    maps: by panel (batch, rows, columns), raw; negative values are drawn as 0; one that is constant or not finite is
    crossed out, with the reason. captions: for each image what stands below it and below each map. Raises InputError
    where numbers do not fit.
    """
    pictures = as_images(images)
    require_length(len(captions), len(pictures), name="captions", of="the images")
    values = [np.asarray(each, dtype=np.float64) for each in maps]
    for own in captions:
        require_length(len(own), 1 + len(values), name="captions of an image", of="its panels")
    across, ratio = 1 + len(values), pictures.shape[2] / pictures.shape[3]
    width = min((WIDE - BAR_ROOM) / across - 0.1, 1.9)
    lines = [[_wrapped(text, int(width / _LETTER)) for text in own] for own in captions]
    below = _LINE * max(len(each) for own in lines for each in own) + 0.1
    width = min(width, max(0.7, (TALL - 0.6) / len(pictures) - below) / ratio)
    drawn = board(
        title=title, count=len(pictures) * across, across=across, panel=(width, width * ratio), gap=(0.1, below),
        margins=Margins(right=BAR_ROOM, bottom=below),
    )  # fmt: skip
    for index, picture in enumerate(pictures):
        panels = drawn.panels[index * across : (index + 1) * across]
        panels[0].imshow(enlarged(picture))
        for axes, of_panel in zip(panels[1:], values):
            _draw(axes, picture, of_panel[index])
        for axes, words in zip(panels, lines[index]):
            axes.annotate(
                "\n".join(words), (0.5, 0.0), (0.0, -3.0), fontsize=SMALL, va="top", ha="center",
                xycoords="axes fraction", textcoords="offset points", linespacing=1.0,
            )  # fmt: skip
    without_frames(drawn.panels)
    colour_bar(drawn.bar(), scale=Scale(0.0, 1.0), label="share of the map's largest")
    return drawn.figure


def _draw(axes: Axes, picture: Array, values: Array) -> None:
    """One map over its image, or the image crossed out, with the map's fault."""
    flaw = "not finite" if not np.isfinite(values).all() else "all equal" if is_constant(values) else ""
    positive = np.zeros_like(values) if flaw else np.clip(values, 0, None)
    most = float(positive.max())
    flaw = flaw or ("" if most > 0 else "no value above 0")
    if not flaw:
        axes.imshow(blend(picture, positive / most, scale=Scale(0.0, 1.0)))
        return
    axes.imshow(enlarged(picture), alpha=0.4)
    for ends in ((0, 1), (1, 0)):
        axes.plot((0, 1), ends, transform=axes.transAxes, color="black", linewidth=0.8)
    plate = {"facecolor": "white", "linewidth": 0.0, "pad": 1.5}
    axes.text(0.5, 0.5, flaw, fontsize=SMALL, ha="center", va="center", transform=axes.transAxes, bbox=plate)


def _wrapped(text: str, letters: int) -> list[str]:
    """A text in at most three lines; a word that is too long, as names of files are, is cut in its middle."""
    tail = max(1, letters // 3)
    words = [
        word if len(word) <= letters else f"{word[: max(1, letters - tail - 1)]}…{word[-tail:]}"
        for word in text.split()
    ]
    return textwrap.wrap(" ".join(words).replace(" %", "\u00a0%"), letters, max_lines=3, placeholder="…")
