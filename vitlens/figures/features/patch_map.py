"""Patches in two dimensions: coloured by their place in the image, and drawn as what they show."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.style import SMALL, WIDE, heading, sheet, styled

_KEY = 0.17  # side of the key of places, as a share of the panel's


@dataclass(frozen=True)
class PatchMap:
    """points: (n, 2), of patches with their positions; content: (n, 2), of the same patches without them; places:
    (n, 2) rows and columns in a grid of (rows, columns); titles: of both maps; cut: indices of the points that are
    drawn as what they show, pixels (cut, 3, height, width) in [0, 1], or None."""

    points: ArrayLike
    content: ArrayLike
    places: ArrayLike
    grid: tuple[int, int]
    titles: tuple[str, str]
    cut: ArrayLike | None = None
    pixels: ArrayLike | None = None


@styled
def patch_map(*, shown: PatchMap, title: str) -> Figure:
    """Two maps of the same patches: with their positions, coloured by place with a key; and without, where some are
    drawn as what they show, and the others in the colour of their place.

    Axes have no unit. Raises InputError where lengths or places do not fit.
    """
    whole, content = (as_array(values, name="points", axes=("points", "2")) for values in (shown.points, shown.content))
    places = as_array(shown.places, name="places", axes=("points", "2"))
    for values, name in ((places, "places"), (content, "points without positions")):
        require_length(len(values), len(whole), name=name, of="the points")
    if len(places) and not (places.min() >= 0 and (places < np.array(shown.grid)).all()):
        raise InputError(f"expected places in a grid of {shown.grid}, found up to {places.max(0).tolist()}")
    figure = sheet(WIDE, 3.7)
    panels = figure.subplots(1, 2)
    words = ("coloured by place in the image (key)", "without the mean of each place")
    for axes, points, word, caption in zip(panels, (whole, content), words, shown.titles, strict=True):
        axes.scatter(points[:, 0], points[:, 1], s=7.0, c=place_colours(places, shown.grid), linewidths=0)
        axes.set_title(word)
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(caption, fontsize=SMALL)
        axes.margins(0.06)
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color("#CCCCCC")
    _draw_key(panels[0], shown.grid, whole)
    if shown.cut is not None and shown.pixels is not None:
        cut, pictures = np.asarray(shown.cut).astype(int), as_images(shown.pixels)
        require_length(len(pictures), len(cut), name="pixels", of="the patches to draw")
        _draw_pictures(panels[1], content[cut], pictures)
        panels[1].set_title(f"{words[1]}; {len(cut)} as pictures")
    heading(figure, title)
    return figure


def place_colours(places: ArrayLike, grid: tuple[int, int]) -> NDArray[np.float64]:
    """A colour (n, 3) for each place: four corner colours, mixed between them, so that near places look alike."""
    corners = np.array([[[0.0, 0.35, 0.75], [0.1, 0.75, 0.5]], [[0.8, 0.25, 0.5], [0.95, 0.75, 0.1]]])
    share = np.asarray(places, dtype=float) / np.maximum(np.array(grid) - 1, 1)
    down, across = share[:, :1], share[:, 1:]
    top = (1 - across) * corners[0, 0] + across * corners[0, 1]
    bottom = (1 - across) * corners[1, 0] + across * corners[1, 1]
    colours: NDArray[np.float64] = (1 - down) * top + down * bottom
    return colours


def _draw_key(axes: Axes, grid: tuple[int, int], points: Array) -> None:
    """The colours of all places, drawn as the image lies, in the corner where it hides fewest points."""
    rows, columns = np.indices(grid)
    colours = place_colours(np.stack([rows.ravel(), columns.ravel()], 1), grid).reshape(*grid, 3)
    share = (points - points.min(0)) / np.maximum(np.ptp(points, axis=0), 1e-12)
    corners = [(x, y) for y in (1 - _KEY, 0.0) for x in (1 - _KEY, 0.0)]
    hidden = [int((np.abs(share - np.array(corner) - _KEY / 2) < _KEY / 2).all(1).sum()) for corner in corners]
    key = axes.inset_axes((*corners[int(np.argmin(hidden))], _KEY, _KEY))
    key.imshow(colours, aspect="auto")
    key.set(xticks=[], yticks=[])
    key.spines[:].set_visible(True)


def _draw_pictures(axes: Axes, points: Array, pictures: Array) -> None:
    for picture, place in zip(pictures, points, strict=True):
        box = OffsetImage(picture.transpose(1, 2, 0), zoom=20 / max(picture.shape[1:]) * 100 / 200)
        axes.add_artist(AnnotationBbox(box, tuple(place), frameon=True, pad=0.06, bboxprops={"linewidth": 0.3}))
