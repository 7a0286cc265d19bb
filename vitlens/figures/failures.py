"""Misclassified images by category: the image, the map of the predicted class, and the image after a causal test."""

from collections.abc import Sequence
from dataclasses import dataclass

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

_ACROSS = 3  # images in a row
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
    """A row of images for each category, each with its map and the image after the category's test.

    Raises InputError without categories or for shapes that do not fit.
    """
    if not groups:
        raise InputError("expected examples of at least one category, found none")
    pictures = [as_images(group.images) for group in groups]
    ratio = pictures[0].shape[2] / pictures[0].shape[3]
    room = WIDE - BAR_ROOM - 0.06 - (_ACROSS - 1) * _BETWEEN - _ACROSS * 2 * _GAP
    tallest = (TALL - 0.5) / len(groups) - _CAPTION - _HEAD
    panel = min(room / (3 * _ACROSS), tallest / ratio)
    drawn = board(
        title=title,
        count=_ACROSS * len(groups),
        across=_ACROSS,
        panel=(3 * panel + 2 * _GAP, panel * ratio),
        gap=(_BETWEEN, _CAPTION + _HEAD),
        margins=Margins(right=BAR_ROOM, top=_HEAD, bottom=_CAPTION),
    )
    for row, (group, images) in enumerate(zip(groups, pictures)):
        frames = drawn.panels[row * _ACROSS : (row + 1) * _ACROSS]
        maps = as_array(group.maps, name="maps", axes=("batch", "rows", "columns"))
        require_length(len(maps), len(images), name="maps", of="the images")
        box = frames[0].get_position()
        height = drawn.figure.get_figheight()
        drawn.figure.text(box.x0, box.y1 + 0.05 / height, group.title, ha="left", va="bottom")
        for index, frame in enumerate(frames):
            places = _three_in(frame, panel)
            if index < len(images):
                _draw(places, group, index, images[index], maps[index], max(8, int(panel / _LETTER)))
            else:
                for axes in places:
                    axes.set_visible(False)
    colour_bar(drawn.bar(), scale=_PERCENT, label="% of its greatest")
    return drawn.figure


def _draw(places: Sequence[Axes], group: ChangedImages, index: int, image: Array, values: Array, letters: int) -> None:
    picture, over, changed = places
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
    if group.changed is None:
        changed.set_visible(False)
    else:
        changed.imshow(enlarged(as_images(group.changed)[index]))
        _caption(changed, *group.after[index], truth, letters)
    without_frames(places)


def _caption(axes: Axes, prediction: str, probability: float, truth: str, letters: int) -> None:
    symbol, colour = (RIGHT_SYMBOL, RIGHT) if prediction == truth else (WRONG_SYMBOL, WRONG)
    text = f"{symbol} {shortened(prediction, max(3, letters - 2))}\n{100 * probability:.0f} %"
    axes.set_xlabel(text, fontsize=SMALL, labelpad=2, color=colour)


def _three_in(frame: Axes, panel: float) -> list[Axes]:
    """Three axes side by side in place of one; panel: the width of each, in inches."""
    figure, box = frame.get_figure(root=True), frame.get_position()
    assert figure is not None
    frame.remove()
    width = figure.get_figwidth()
    return [
        figure.add_axes((box.x0 + step * (panel + _GAP) / width, box.y0, panel / width, box.height))
        for step in range(3)
    ]
