"""Rows of overlays: an image, then its maps, all panels with one colour scale."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, PHOTOGRAPHS, Board, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import OPACITY, Scale, blend, colour_bar, enlarged, is_constant, joint_scale, upsample
from vitlens.figures.style import RIGHT, RIGHT_SYMBOL, SMALL, TALL, WIDE, WRONG, WRONG_SYMBOL, styled

_LETTER = 0.065  # inch per letter of a caption
_NARROW = 10  # characters of a caption that fit below any panel
_WRAP = 7  # most panels side by side; more are divided into lines


@styled
def overlay_rows(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    title: str,
    label: str,
    names: Sequence[str] | None = None,
    masks: ArrayLike | None = None,
    hits: ArrayLike | None = None,
    scale: Scale | None = None,
    smooth: bool = True,
    failed: Sequence[str] | None = None,
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], each followed by overlays of its maps (batch, panels, rows, columns).

    titles: one per panel; title: of the figure; label: the maps' unit, at the colour bar; names: one per image; masks:
    (batch, height, width), outlined in white; hits: (batch, panels), whether each map's highest point lies on the mask,
    marked by colour and symbol; scale: shared range of colours (default: the joint range of these maps); failed: one
    per panel, why its maps say nothing, in a few words ("": they do). Maps of a failed panel are crossed out with the
    reason, without a mark; so are uniform ones, which have no highest point. Raises InputError when shapes do not fit
    or a number is not finite.
    """
    pictures = as_images(images)
    values = as_array(maps, name="maps", axes=("batch", "panels", "rows", "columns"))
    batch, panels = values.shape[:2]
    require_length(batch, len(pictures), name="sets of maps", of="the images")
    require_length(len(titles), panels, name="titles", of="the maps of an image")
    require_length(len(names or pictures), batch, name="names", of="the images")
    outlines = None if masks is None else _checked(masks, "masks", ("batch", "height", "width"), pictures[:, 0].shape)
    is_hit = None if hits is None else _checked(hits, "hits", ("batch", "panels"), (batch, panels))
    shared = scale or joint_scale(values.reshape(-1, *values.shape[2:]))

    reasons = failed or [""] * panels
    require_length(len(reasons), panels, name="reasons", of="the maps of an image")
    captions = int(bool(names) or is_hit is not None)
    captions = max([captions, *(len(_lines(name, _NARROW)) for name in names or ())])
    drawn = _board(title, batch, panels + 1, ratio=pictures.shape[2] / pictures.shape[3], captions=captions)
    cells = [drawn.panels[start : start + panels + 1] for start in range(0, len(drawn.panels), panels + 1)]
    for index, picture in enumerate(pictures):
        above = index == 0
        cells[index][0].imshow(enlarged(picture))
        _caption(cells[index][0], "input" if above else "", names[index] if names else "")
        for panel, axes in enumerate(cells[index][1:]):
            own, below = values[index, panel], ""
            constant = is_constant(own)
            reason = "uniform" if constant else reasons[panel]
            axes.imshow(blend(picture, own, scale=shared, smooth=smooth, opacity=0.0 if constant else OPACITY))
            if reason:
                cross_out(axes, reason)
            elif is_hit is not None:
                below = mark_peak(axes, values[index, panel], hit=bool(is_hit[index, panel]))
            _caption(axes, titles[panel] if above else "", below)
        if outlines is not None:
            for axes in cells[index]:
                outline(axes, outlines[index])
    without_frames(drawn.panels)
    colour_bar(drawn.bar(), scale=shared, label=label)
    return drawn.figure


def _checked(values: ArrayLike, name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    array = as_array(values, name=name, axes=axes)
    if array.shape != shape:
        raise InputError(f"expected {name} of shape {shape}, found {array.shape}")
    return array


def _board(title: str, batch: int, panels: int, *, ratio: float, captions: int) -> Board:
    """One line per image; the panels of a single image are divided into lines of about equal length."""
    lines = -(-panels // _WRAP) if batch == 1 else 1
    across, down = -(-panels // lines), lines * batch
    caption_room = 0.08 + 0.14 * captions
    gap = (0.07, caption_room + (0.16 if lines > 1 else 0.0))
    width = min(
        (WIDE - BAR_ROOM - 0.06) / across - gap[0],
        ((TALL - 0.7) / down - gap[1]) / ratio,
        (PHOTOGRAPHS / (batch * panels * ratio)) ** 0.5,
        1.7,
    )
    margins = Margins(right=BAR_ROOM, top=0.22, bottom=caption_room)
    size = (width, width * ratio)
    return board(title=title, count=batch * panels, across=across, panel=size, gap=gap, margins=margins)


def _caption(axes: Axes, above: str, below: str) -> None:
    axes.set_title(above)
    wide = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    axes.set_xlabel("\n".join(_lines(below, max(_NARROW, int(wide / _LETTER)))), fontsize=SMALL, labelpad=2)


def _lines(caption: str, characters: int) -> list[str]:
    """A caption in at most three lines, without a line break between a number and its % sign."""
    return textwrap.wrap(caption.replace(" %", "\u00a0%"), characters, max_lines=3, placeholder="…")


def mark_peak(axes: Axes, values: Array, *, hit: bool) -> str:
    """Mark the highest point of a map; returns the caption, whether it is a hit."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    y, x = np.unravel_index(upsample(values, (height, width)).argmax(), (height, width))
    colour, symbol, word = (RIGHT, RIGHT_SYMBOL, "hit") if hit else (WRONG, WRONG_SYMBOL, "miss")
    marker = "o" if hit else "X"
    axes.plot(x, y, marker, color=colour, markeredgecolor="white", markersize=6, markeredgewidth=0.9, clip_on=False)
    axes.xaxis.label.set_color(colour)
    return f"{symbol} {word}"


def outline(axes: Axes, mask: Array) -> None:
    """Draw the border of a mask (height, width) in white over black, visible on any background."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    edge = np.pad(upsample(mask, (height, width), smooth=False), 1)
    where = np.arange(-1, height + 1), np.arange(-1, width + 1)
    for colour, thickness in (("black", 1.8), ("white", 0.9)):
        axes.contour(where[1], where[0], edge, levels=[0.5], colors=colour, linewidths=thickness)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
