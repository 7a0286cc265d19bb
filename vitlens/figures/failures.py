"""Misclassified images by category: the image, the map of the predicted class, and the image after a causal test."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import OPACITY, Scale, blend, colour_bar, enlarged, is_constant
from vitlens.figures.overlays import outline
from vitlens.figures.style import (
    LABEL,
    RIGHT,
    RIGHT_SYMBOL,
    SMALL,
    TALL,
    WIDE,
    WRONG,
    WRONG_SYMBOL,
    shortened,
    styled,
)

_PANELS = 9  # in a row: an image has two or three
_IMAGES = 4  # in a row, at most
_LINE = 0.15  # inch per further line of a title
_GAP = 0.05  # inch between the panels of an image
_BETWEEN = 0.14  # inch between images
_LETTER = 0.072  # inch per letter of a caption
_CAPTION, _HEAD = 0.3, 0.22  # inch below the panels, and above a row for its title
_PERCENT = Scale(0.0, 100.0)


@dataclass(frozen=True)
class ChangedImages:
    """At most three images of one category.

    images: (n, 3, height, width) in [0, 1]; maps: (n, rows, columns), not negative; masks: (n, height, width) of
    objects, outlined, or None; changed: the images after the test, or None; truths: true classes; before, after: the
    prediction and its probability for the image and for the changed image.
    """

    title: str
    images: ArrayLike
    maps: ArrayLike
    masks: ArrayLike | None
    changed: ArrayLike | None
    truths: Sequence[str]
    before: Sequence[tuple[str, float]]
    after: Sequence[tuple[str, float]]


@styled
def failure_examples(*, groups: Sequence[ChangedImages], title: str) -> Figure:
    """The images of each category, each with its map and, where one has a causal test, the image after it.

    Categories of few images share a row. Raises InputError without categories or for shapes that do not fit.
    """
    if not groups:
        raise InputError("expected examples of at least one category, found none")
    pictures = [as_images(group.images) for group in groups]
    ratio = pictures[0].shape[2] / pictures[0].shape[3]
    each = [2 if group.changed is None else 3 for group in groups]  # pictures of an image
    rows = _rows([len(images) * count for images, count in zip(pictures, each)])
    room = WIDE - BAR_ROOM - 0.06 - _IMAGES * (_BETWEEN - _GAP) - (_PANELS - 1) * _GAP
    panel = min(room / _PANELS, ((TALL - 0.5) / len(rows) - _CAPTION - _HEAD) / ratio)
    wide = [count * panel + (count - 1) * _GAP + _BETWEEN for count in each]
    lines = [
        wrap(group.title, max(12, int(len(images) * width / _LETTER)), max_lines=3, placeholder="…")
        for group, images, width in zip(groups, pictures, wide)
    ]
    head = _HEAD + _LINE * (max(map(len, lines)) - 1)
    row_height = head + panel * ratio + _CAPTION
    across = max(sum(len(pictures[place]) * wide[place] for place in row) for row in rows) - _BETWEEN
    margins = Margins(right=BAR_ROOM, top=0.0, bottom=len(rows) * row_height)
    drawn = board(title=title, count=0, across=1, panel=(across, 0.0), gap=(0.0, 0.0), margins=margins)
    for line, row in enumerate(rows):
        left, top = drawn.left, drawn.top + line * row_height + head
        for place in row:
            images = pictures[place]
            maps = as_array(groups[place].maps, name="maps", axes=("batch", "rows", "columns"))
            require_length(len(maps), len(images), name="maps", of="the images")
            for index, image in enumerate(images):
                steps = (left + step * (panel + _GAP) for step in range(each[place]))
                axes = [drawn.place(step, top, panel, panel * ratio) for step in steps]
                if index == 0:
                    axes[0].set_title("\n".join(lines[place]), loc="left", fontsize=LABEL, linespacing=1.0)
                _draw(axes, groups[place], index, image, maps[index], max(8, int(panel / _LETTER)))
                left += wide[place]
    tall = len(rows) * row_height
    long = min(max(tall - head - _CAPTION, 1.2), 3.0)
    bar = drawn.place(
        drawn.figure.get_figwidth() - BAR_ROOM + 0.14, drawn.top + (tall + head - _CAPTION - long) / 2, 0.11, long
    )
    colour_bar(bar, scale=_PERCENT, label="% of its greatest")
    return drawn.figure


def _rows(counts: Sequence[int]) -> list[list[int]]:
    """The categories of each row, in order, as many as their numbers of panels allow."""
    rows: list[list[int]] = []
    left = 0
    for index, count in enumerate(counts):
        if count > left:
            rows.append([])
            left = _PANELS
        rows[-1].append(index)
        left -= count
    return rows


def _draw(places: Sequence[Axes], group: ChangedImages, index: int, image: Array, values: Array, letters: int) -> None:
    picture, over, *further = places
    truth = group.truths[index]
    picture.imshow(enlarged(image))
    picture.set_xlabel(f"{shortened(truth, letters)}\nlabel", fontsize=SMALL, labelpad=2)
    greatest, uniform = values.max(), is_constant(values)
    shares = 100 * values / greatest if greatest > 0 else values
    over.imshow(blend(image, shares, scale=_PERCENT, opacity=0.0 if uniform else OPACITY))
    if uniform:
        cross_out(over, "uniform")
    _caption(over, *group.before[index], truth, letters)
    if group.masks is not None:
        mask = as_array(group.masks, name="masks", axes=("batch", "height", "width"))[index]
        for axes in (picture, over):
            outline(axes, mask)
    if group.changed is not None:
        further[0].imshow(enlarged(as_images(group.changed)[index]))
        _caption(further[0], *group.after[index], truth, letters)
    without_frames(places)


def _caption(axes: Axes, prediction: str, probability: float, truth: str, letters: int) -> None:
    symbol, colour = (RIGHT_SYMBOL, RIGHT) if prediction == truth else (WRONG_SYMBOL, WRONG)
    text = f"{symbol} {shortened(prediction, max(3, letters - 2))}\n{100 * probability:.0f} %"
    axes.set_xlabel(text, fontsize=SMALL, labelpad=2, color=colour)
