"""Two models' maps of the same images: input, first, second side by side; and their mean maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, PHOTOGRAPHS, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import Array, as_array, as_image, as_images, require_length
from vitlens.figures.overlay import OPACITY, Scale, blend, colour_bar, draw_map, enlarged, is_constant
from vitlens.figures.overlays import outline
from vitlens.figures.style import (
    GREY,
    RIGHT,
    RIGHT_SYMBOL,
    SERIES,
    SMALL,
    WIDE,
    WRONG,
    WRONG_SYMBOL,
    heading,
    sheet,
    shortened,
    styled,
)

_GAP = 0.06  # inch between the three panels of an image
_BETWEEN = 0.16  # inch between images
_LETTER = 0.062  # inch per letter of a caption
_PERCENT = Scale(0.0, 100.0)


@dataclass(frozen=True)
class ModelPanels:
    """One model's maps and predictions of n images.

    name: of the model; maps: (n, rows, columns), not negative, each drawn in % of its greatest value; prediction: its
    class name for each image; probability: of it, fractions (n,); right: (n,), whether it is correct.
    """

    name: str
    maps: ArrayLike
    prediction: Sequence[str]
    probability: ArrayLike
    right: Sequence[bool]


@styled
def contact_sheet(
    *,
    images: ArrayLike,
    first: ModelPanels,
    second: ModelPanels,
    truths: Sequence[str],
    agreement: Sequence[float | None],
    title: str,
    masks: ArrayLike | None = None,
    across: int = 2,
) -> Figure:
    """Images (n, 3, height, width) in [0, 1], each followed by the two models' maps over the image in grey.

    truths: the true class of each image; agreement: of the two maps (None where one is not usable), below the input;
    masks: (n, height, width), outlined; across: images side by side. Below each map: the prediction, marked right or
    wrong by colour and symbol, and its probability. Raises InputError when shapes do not fit.
    """
    pictures = as_images(images)
    count = len(pictures)
    for name, values in (("truths", truths), ("agreements", agreement)):
        require_length(len(values), count, name=name, of="the images")
    sides = [_checked(side, count) for side in (first, second)]
    outlines = None if masks is None else as_array(masks, name="masks", axes=("batch", "height", "width"))
    across = min(across, count)
    ratio = pictures.shape[2] / pictures.shape[3]
    room = WIDE - BAR_ROOM - 0.06 - (across - 1) * _BETWEEN - across * 2 * _GAP
    panel = min(room / (3 * across), (PHOTOGRAPHS / (3 * count * ratio)) ** 0.5, 1.5)
    caption = 0.12 + 0.14 * 2
    drawn = board(
        title=title,
        count=count,
        across=across,
        panel=(3 * panel + 2 * _GAP, panel * ratio),
        gap=(_BETWEEN, caption),
        margins=Margins(right=BAR_ROOM, top=0.22, bottom=caption),
    )
    letters = max(8, int(panel / _LETTER))
    for index, frame in enumerate(drawn.panels):
        places = _three_panels(frame, panel, ratio)
        places[0].imshow(enlarged(pictures[index]))
        known = agreement[index]
        below = f"{shortened(truths[index], letters)}\n" + ("no agreement" if known is None else f"agree {known:.2f}")
        places[0].set_xlabel(below, fontsize=SMALL, labelpad=2)
        for axes, side, (maps, _) in zip(places[1:], (first, second), sides):
            uniform = is_constant(maps[index])
            axes.imshow(blend(pictures[index], maps[index], scale=_PERCENT, opacity=0.0 if uniform else OPACITY))
            if uniform:
                cross_out(axes, "uniform")
            _caption(axes, side, index, letters)
        if outlines is not None:
            for axes in places:
                outline(axes, outlines[index])
        without_frames(places)
        if index < across:
            for axes, word in zip(places, ("input", first.name, second.name)):
                axes.set_title(shortened(word, letters))
    colour_bar(drawn.bar(), scale=_PERCENT, label="% of its greatest")
    return drawn.figure


def _three_panels(frame: Axes, panel: float, ratio: float) -> list[Axes]:
    """Three axes side by side in place of one; panel: the width of each, in inches; ratio: height by width."""
    figure, box = frame.get_figure(root=True), frame.get_position()
    assert figure is not None
    frame.remove()
    width, height = figure.get_size_inches()
    return [
        figure.add_axes((box.x0 + step * (panel + _GAP) / width, box.y0, panel / width, panel * ratio / height))
        for step in range(3)
    ]


def _checked(side: ModelPanels, count: int) -> tuple[Array, Array]:
    maps = as_array(side.maps, name=f"maps of {side.name}", axes=("batch", "rows", "columns"))
    probability = as_array(side.probability, name=f"probability of {side.name}", axes=("batch",))
    for name, values in (
        ("maps", maps),
        ("probabilities", probability),
        ("predictions", side.prediction),
        ("rights", side.right),
    ):
        require_length(len(values), count, name=f"{name} of {side.name}", of="the images")
    if maps.min() < 0:
        raise InputError(f"expected maps of {side.name} without negative values, found {maps.min():.3g}")
    greatest = maps.max((1, 2), keepdims=True)
    return 100 * maps / np.where(greatest > 0, greatest, 1.0), probability


def _caption(axes: Axes, side: ModelPanels, index: int, letters: int) -> None:
    right = bool(side.right[index])
    symbol, colour = (RIGHT_SYMBOL, RIGHT) if right else (WRONG_SYMBOL, WRONG)
    probability = f"{100 * float(np.asarray(side.probability)[index]):.0f} %"
    caption = f"{symbol} {shortened(side.prediction[index], max(3, letters - 2))}\n{probability}"
    axes.set_xlabel(caption, fontsize=SMALL, labelpad=2, color=colour)


def panel_pictures(
    *, image: ArrayLike, maps: tuple[ArrayLike, ...], mask: ArrayLike | None = None
) -> tuple[NDArray[np.uint8], ...]:
    """An image (3, height, width) in [0, 1], and each map over it, as pixels (height, width, 3) without a figure.

    maps: (rows, columns) each, coloured from 0 to their maximum, negative values as 0; mask: (height, width), outlined
    in white.
    """
    picture = as_image(image)
    drawn = [enlarged(picture)]
    for values in maps:
        positive = np.maximum(as_array(values, name="map", axes=("rows", "columns")), 0)
        drawn.append(blend(picture, 100 * positive / (positive.max() or 1.0), scale=_PERCENT))
    if mask is not None:
        object_ = as_array(mask, name="mask", axes=("height", "width")) > 0
        times = drawn[0].shape[0] // object_.shape[0]
        border = _border(object_.repeat(times, axis=0).repeat(times, axis=1))
        for each in drawn:
            each[border] = 1.0
    return tuple(np.round(np.clip(each, 0, 1) * 255).astype(np.uint8) for each in drawn)


def _border(object_: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The outermost two pixels of an object."""
    inside = np.pad(object_, 2)
    for axis in (0, 1):
        for step in (-2, 2):
            inside &= np.roll(np.pad(object_, 2), step, axis=axis)
    return np.asarray(object_ & ~inside[2:-2, 2:-2])


@styled
def mean_maps(
    *, first: ArrayLike, second: ArrayLike, names: tuple[str, str], agreement: ArrayLike, title: str
) -> Figure:
    """Both models' mean map (rows, columns), which sums to 1, on one scale; and the agreement of their maps.

    agreement: one number per image, -1 to 1, drawn as a histogram with its median. Raises InputError for other shapes.
    """
    maps = [as_array(mean, name="mean map", axes=("rows", "columns")) for mean in (first, second)]
    values = as_array(agreement, name="agreement", axes=("batch",))
    figure = sheet(WIDE, 2.5)
    left, middle, bar, right = figure.subplots(1, 4, width_ratios=[1, 1, 0.06, 1.35])
    densities = [mean * mean.size for mean in maps]
    shared = Scale(min(map(np.min, densities)), max(map(np.max, densities)))
    for axes, density, name in zip((left, middle), densities, names):
        draw_map(axes, density, scale=shared)
        axes.set_aspect(density.shape[1] / density.shape[0] * density.shape[0] / density.shape[1])
        axes.set_title(shortened(name, 24))
        without_frames([axes])
    colour_bar(bar, scale=shared, label="times a uniform map")
    right.hist(values, bins=np.linspace(-1, 1, 33).tolist(), color=GREY)
    middle_value = float(np.median(values))
    right.axvline(middle_value, color=SERIES[1], linewidth=1.2)
    right.set_title(f"agreement of the maps, median {middle_value:.2f}")
    right.set(xlabel="rank correlation over cells", ylabel="images", xlim=(-1, 1))
    heading(figure, title)
    return figure
