"""Features in two dimensions: every image (or patch) is a point, misclassified ones are marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.style import GREY, SERIES, SMALL, WIDE, WRONG, heading, sheet, shortened, styled

NAMED: Final = 20  # classes whose colours and names can still be distinguished
_APART: Final = 0.085  # least distance of two names, as a share of a panel's side
_BUSY: Final = 600  # points from which they are drawn smaller


Rgba = tuple[float, float, float, float]


@dataclass(frozen=True)
class Cloud:
    """One panel: points (n, 2); labels (n,): class indices, or None; wrong (n,): misclassified, or None; title: of
    the panel; thumbnails (n, 3, height, width): drawn in place of the points, or None; named: whether the name of each
    class is written at the middle of its points."""

    title: str
    points: ArrayLike
    labels: ArrayLike | None = None
    wrong: ArrayLike | None = None
    thumbnails: ArrayLike | None = None
    named: bool = True


@styled
def feature_space(*, clouds: Sequence[Cloud], classes: Sequence[str], title: str, wrong: str = "") -> Figure:
    """Clouds of points side by side, two in a row, coloured by class where there are at most twenty.

    wrong: the classifier that misclassified the points with a cross ("by the model"). Axes have no unit and no numbers,
    as only distances between points have a meaning. Raises InputError for no cloud, and where lengths differ.
    """
    if not clouds:
        raise InputError("expected at least one cloud of points, found none")
    across = min(2, len(clouds))
    down = -(-len(clouds) // across)
    figure = sheet(WIDE if across == 2 else WIDE * 0.62, 0.2 + 3.45 * down)
    panels = figure.subplots(down, across, squeeze=False)
    marked, palette = False, _palette(clouds)
    for axes, cloud in zip(panels.flat, clouds):
        marked |= _draw(axes, cloud, classes, palette, wrong)
    for axes in panels.flat[len(clouds) :]:
        axes.set_visible(False)
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=5, color=colour, label=shortened(classes[label], 18))
        for label, colour in palette.items()
    ]
    if marked:
        handles.append(
            Line2D([], [], linestyle="", marker="x", color="black", markersize=5, label=f"misclassified {wrong}")
        )
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncol=6 if across == 2 else 4, fontsize=SMALL)
    heading(figure, title)
    return figure


def _draw(axes: Axes, cloud: Cloud, classes: Sequence[str], palette: Mapping[int, Rgba], by: str) -> bool:
    """Fill one panel; returns whether any point is marked with a cross."""
    points = as_array(cloud.points, name=f"points of {cloud.title}", axes=("points", "2"))
    labels = None if cloud.labels is None else as_array(cloud.labels, name="labels", axes=("points",))
    wrong = np.zeros(len(points), bool) if cloud.wrong is None else np.asarray(cloud.wrong).astype(bool)
    for name, values in (("labels", labels), ("marks", wrong)):
        if values is not None:
            require_length(len(values), len(points), name=name, of="the points")
    named = labels is not None and bool(palette)
    colours = _colours(labels, wrong, palette)
    size = 7.0 if len(points) > _BUSY else 14.0
    if cloud.thumbnails is None:
        axes.scatter(points[:, 0], points[:, 1], s=size, c=colours, linewidths=0, alpha=0.75)
    else:
        _pictures(axes, points, as_images(cloud.thumbnails), colours)
    if named and wrong.any():
        axes.scatter(points[wrong, 0], points[wrong, 1], s=1.6 * size, marker="x", c="black", linewidths=0.7)
    if labels is not None and named and cloud.named:
        _name_classes(axes, points, labels, classes)
    axes.set_title(cloud.title)
    axes.set(xticks=[], yticks=[])
    axes.margins(0.06)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("#CCCCCC")
    if not named and wrong.any():
        axes.set_xlabel(f"red: misclassified {by}".rstrip(), fontsize=SMALL)
    return bool(named and wrong.any())


def _colours(labels: Array | None, wrong: NDArray[np.bool_], palette: Mapping[int, Rgba]) -> Array:
    """A colour for each point: of its class; with many classes, whether it is misclassified; grey without labels."""
    if labels is None or not palette:
        return np.array([to_rgba(WRONG if is_wrong else GREY) for is_wrong in wrong.tolist()])
    return np.array([palette[int(label)] for label in labels.tolist()])


def _palette(clouds: Sequence[Cloud]) -> dict[int, Rgba]:
    """A colour for each class of all clouds; none where they are too many to be distinguished."""
    known = [as_array(cloud.labels, name="labels", axes=("points",)) for cloud in clouds if cloud.labels is not None]
    present = sorted({int(label) for labels in known for label in labels.tolist()})
    if len(present) > NAMED:
        return {}
    wheel = colormaps["tab20" if len(present) > 10 else "tab10"]
    colours = SERIES if len(present) <= len(SERIES) else [wheel(index) for index in range(len(present))]
    return {label: to_rgba(colours[index]) for index, label in enumerate(present)}


def _name_classes(axes: Axes, points: Array, labels: Array, classes: Sequence[str]) -> None:
    """Write each class's name at the median of its points, unless another name is there."""
    taken: list[Array] = []
    side = np.ptp(points, axis=0) + 1e-12
    for label in np.unique(labels).tolist():
        x, y = middle = np.median(points[labels == label], axis=0)
        if any((np.abs(middle - other) / side < (2 * _APART, _APART)).all() for other in taken):
            continue
        taken.append(middle)
        word = axes.text(x, y, shortened(classes[int(label)], 14), ha="center", va="center", fontsize=SMALL)
        word.set_path_effects([withStroke(linewidth=2.2, foreground="white")])


def _pictures(axes: Axes, points: Array, pictures: Array, colours: Array) -> None:
    """Draw small images in place of points, each framed in its colour."""
    require_length(len(pictures), len(points), name="thumbnails", of="the points")
    axes.scatter(points[:, 0], points[:, 1], s=1, c=colours)  # sets the range of the axes
    side = float(np.clip(620 / np.sqrt(len(points)), 12, 44))  # pixels at 200 dots an inch
    for picture, (x, y), colour in zip(pictures, points, colours, strict=True):
        box = OffsetImage(picture.transpose(1, 2, 0), zoom=side / max(picture.shape[1:]) * 100 / 200)
        frame = AnnotationBbox(box, (x, y), frameon=True, pad=0.1)
        frame.patch.set(edgecolor=colour, linewidth=1.0)
        axes.add_artist(frame)
