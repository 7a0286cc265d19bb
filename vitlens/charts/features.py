"""Figures of features: points in two dimensions, patches by place, and matches of patches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import ConnectionPatch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from vitlens.charts.overlay import enlarged
from vitlens.charts.panels import Margins, board, without_frames
from vitlens.charts.style import (
    GREY,
    MAGNITUDE,
    SERIES,
    SMALL,
    WRONG,
    abreast,
    full_width,
    heading,
    in_column,
    sheet,
    shorten,
    styled,
)

NAMED: Final = 20  # classes whose colours and names can still be distinguished
_APART: Final = 0.085  # least distance of two names, as a share of a panel's side
_BUSY: Final = 600  # points from which they are drawn smaller
_KEY: Final = 0.17  # side of the key of places, as a share of the panel's
_ARCS: Final = 15  # of a pair of images, at most
_NARROW: Final = 0.62  # share of a page's width for a figure of one panel

Array = NDArray[Any]
Rgba = tuple[float, float, float, float]


@dataclass(frozen=True)
class Cloud:
    """A panel of `feature_space`.

    points: (n, 2).
    classes: the names of the classes.
    labels: (n,) indices into classes, or None.
    wrong: (n,) True for misclassified points, or None.
    by: the classifier that misclassifies them, as the legend names it.
    thumbnails: (n, 3, height, width), drawn in place of the points, or None.
    named: True if the name of each class is written at the median of its points.
    """

    title: str
    points: Array
    classes: Sequence[str]
    labels: Array | None = None
    wrong: Array | None = None
    by: str = ""
    thumbnails: Array | None = None
    named: bool = True

    def with_thumbnails(self, chosen: Array, pixels: Array) -> "Cloud":
        """Return some of its points as small images (chosen, 3, height, width) in [0, 1]."""
        return Cloud(
            title=f"{len(chosen)} of them as thumbnails",
            points=self.points[chosen],
            classes=self.classes,
            labels=None if self.labels is None else self.labels[chosen],
            wrong=None if self.wrong is None else self.wrong[chosen],
            by=self.by,
            thumbnails=pixels,
        )


@dataclass(frozen=True)
class _Mark:
    """An entry of a legend. Two classes may have the same shortened name."""

    name: str
    marker: str
    colour: Rgba


@styled
def feature_space(clouds: Sequence[Cloud], title: str) -> Figure:
    """Draw clouds of points, two in a row, coloured by class if there are at most NAMED classes.

    Axes have no unit, as only distances between points have a meaning.
    """
    across = abreast(min(2, len(clouds)))
    down = ceil(len(clouds) / across)
    width = full_width()
    if across == 1 and not in_column():
        width *= _NARROW
    figure = sheet(width, 0.2 + 3.45 * down)
    panels = figure.subplots(down, across, squeeze=False)
    palette = _palette(clouds)
    names = {}
    marks = []
    for label, colour in palette.items():
        names[label] = shorten(clouds[0].classes[label], 18)
        marks.append(_Mark(names[label], "o", colour))
    for axes, cloud in zip(panels.flat, clouds):
        errors = _draw_cloud(axes, cloud, palette, names)
        if errors is not None and errors not in marks:  # panels may have the same errors
            marks.append(errors)
    for axes in panels.flat[len(clouds) :]:
        axes.set_visible(False)
    if marks:
        _legend_of_marks(figure, marks, columns=_legend_columns(across))
    heading(figure, title)
    return figure


@dataclass(frozen=True)
class QueryKeyCloud:
    """A panel of `query_key_space`.

    points: (n, 2).
    is_key: (n,).
    layers: (n,) numbers, or None for one colour each of queries and keys.
    marked: (n,) points with a black edge, or None.
    """

    title: str
    points: Array
    is_key: Array
    layers: Array | None = None
    marked: Array | None = None


@styled
def query_key_space(clouds: Sequence[QueryKeyCloud], title: str) -> Figure:
    """Draw queries as dots and keys as triangles, coloured by kind or by layer."""
    across = abreast(len(clouds))
    down = ceil(len(clouds) / across)
    figure = sheet(full_width(), 0.4 + 3.3 * down)
    panels = figure.subplots(down, across, squeeze=False)
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=5, color=SERIES[0], label="query"),
        Line2D([], [], linestyle="", marker="^", markersize=5, color=SERIES[1], label="key"),
    ]
    for axes, cloud in zip(panels.flat, clouds):
        last_layer = 1
        if cloud.layers is not None:
            last_layer = max(last_layer, int(cloud.layers.max()))
        kinds = (("o", ~cloud.is_key, SERIES[0]), ("^", cloud.is_key, SERIES[1]))
        for marker, is_kind, colour in kinds:
            colours: Any = colour
            if cloud.layers is not None:
                colours = colormaps[MAGNITUDE](cloud.layers[is_kind] / last_layer)
            edges = np.zeros(int(is_kind.sum()))  # widths
            if cloud.marked is not None:
                edges = np.where(cloud.marked[is_kind], 0.9, 0.0)
            x, y = cloud.points[is_kind].T
            axes.scatter(
                x,
                y,
                s=11,
                marker=marker,
                c=colours,
                alpha=0.8,
                linewidths=edges,
                edgecolors="black",
            )
        if cloud.layers is not None:
            scale = Normalize(0, last_layer)
            bar = figure.colorbar(
                ScalarMappable(scale, MAGNITUDE), ax=axes, shrink=0.8, label="layer"
            )
            bar.outline.set_visible(False)
            bar.locator = MaxNLocator(6, integer=True)
        axes.set_title(cloud.title)
        _frame(axes)
    figure.legend(handles=handles, loc="outside lower center", ncol=2, fontsize=SMALL)
    heading(figure, title)
    return figure


def _legend_columns(across: int) -> int:
    if in_column():
        return 2
    return 6 if across == 2 else 4


def _legend_of_marks(figure: Figure, marks: Sequence[_Mark], *, columns: int) -> None:
    handles = []
    for mark in marks:
        handles.append(
            Line2D(
                [],
                [],
                linestyle="",
                marker=mark.marker,
                markersize=5,
                color=mark.colour,
                label=mark.name,
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncol=columns, fontsize=SMALL)


def _draw_cloud(
    axes: Axes, cloud: Cloud, palette: Mapping[int, Rgba], names: Mapping[int, str]
) -> _Mark | None:
    """Draw one panel; return the entry of its errors in the legend, None if it has no entry."""
    points = cloud.points
    errors = None
    wrong = np.zeros(len(points), bool)
    if cloud.wrong is not None:
        wrong = cloud.wrong.astype(bool)
    if cloud.labels is None or not palette:
        colours = np.where(wrong[:, None], to_rgba(WRONG), to_rgba(GREY))
    else:
        colours = np.array([palette[label] for label in cloud.labels.tolist()])
    size = 7.0 if len(points) > _BUSY else 14.0
    if cloud.thumbnails is None:
        axes.scatter(points[:, 0], points[:, 1], s=size, c=colours, linewidths=0, alpha=0.75)
    else:
        # pixels at 200 dots an inch: all thumbnails together cover the same area
        side = float(np.clip(620 / np.sqrt(len(points)), 12, 44))
        axes.scatter(points[:, 0], points[:, 1], s=1, c=colours)  # sets the range of the axes
        _pictures(axes, points, cloud.thumbnails, side=side, colours=colours)
    if palette and wrong.any():
        axes.scatter(
            points[wrong, 0], points[wrong, 1], s=1.6 * size, marker="x", c="black", linewidths=0.7
        )
        errors = _Mark(f"misclassified {cloud.by}", "x", to_rgba("black"))
    elif wrong.any():
        axes.set_xlabel(f"orange: misclassified {cloud.by}", fontsize=SMALL)
    if cloud.labels is not None and palette and cloud.named:
        _name_classes(axes, points, cloud.labels, names)
    axes.set_title(cloud.title)
    _frame(axes)
    return errors


def _frame(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.margins(0.06)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("#CCCCCC")


def _palette(clouds: Sequence[Cloud]) -> dict[int, Rgba]:
    """Return a colour for each class, none if they are too many to be distinguished."""
    present: set[int] = set()
    for cloud in clouds:
        if cloud.labels is not None:
            present.update(map(int, cloud.labels))
    classes = sorted(present)
    if len(classes) > NAMED:
        return {}
    if len(classes) <= len(SERIES):
        return {label: to_rgba(colour) for label, colour in zip(classes, SERIES)}
    wheel = colormaps["tab20" if len(classes) > 10 else "tab10"]
    return {label: to_rgba(wheel(index)) for index, label in enumerate(classes)}


def _name_classes(axes: Axes, points: Array, labels: Array, names: Mapping[int, str]) -> None:
    """Write each class's name at the median of its points, unless another name is there."""
    written: list[Array] = []  # the middles of the names
    sides = np.ptp(points, axis=0) + 1e-12
    apart = (2 * _APART, _APART)  # shares of the sides: a name is wider than high
    for label, name in names.items():
        if label not in labels:
            continue
        middle = np.median(points[labels == label], axis=0)
        if any((np.abs(middle - other) / sides < apart).all() for other in written):
            continue
        written.append(middle)
        x, y = middle
        word = axes.text(x, y, shorten(name, 14), ha="center", va="center", fontsize=SMALL)
        word.set_path_effects([withStroke(linewidth=2.2, foreground="white")])


def _pictures(
    axes: Axes, points: Array, pictures: Array, *, side: float, colours: Array | None = None
) -> None:
    """Draw small images in place of points, each framed in its colour.

    side: the longer side of an image, in pixels at 200 dots an inch.
    """
    for index, (picture, place) in enumerate(zip(pictures, points, strict=True)):
        # matplotlib's zoom is for 100 dots an inch
        zoom = side / max(picture.shape[1:]) * 100 / 200
        box = OffsetImage(picture.transpose(1, 2, 0), zoom=zoom)
        frame = AnnotationBbox(
            box, tuple(place), frameon=True, pad=0.08, bboxprops={"linewidth": 0.3}
        )
        if colours is not None:
            frame.patch.set(edgecolor=colours[index], linewidth=1.0)
        axes.add_artist(frame)


@dataclass(frozen=True)
class PatchMap:
    """Patches as points of two maps.

    points: (n, 2), the patches with their positions.
    content: (n, 2), the same patches without their positions.
    captions: the captions of both maps.
    places: (n, 2), the row and column of each patch in the grid.
    grid: the number of rows and columns.
    cut: indices of the points that are drawn as pictures, or None.
    pixels: (len(cut), 3, height, width) in [0, 1], the pictures.
    """

    model: str
    points: Array
    content: Array
    captions: Sequence[str]
    places: Array
    grid: Sequence[int]
    cut: Array | None = None
    pixels: Array | None = None


@styled
def patch_map(maps: Sequence[PatchMap], title: str) -> Figure:
    """Draw two maps of the same patches, coloured by place: with their positions, and without.

    The first has a key of the colours; in the second some patches are drawn as pictures.
    """
    (patches,) = maps  # a chart gets rows: here the one of its model
    across = abreast(2)
    figure = sheet(full_width(), 3.7 * 2 / across)
    panels = figure.subplots(2 // across, across, squeeze=False).ravel()
    words = ["coloured by place in the image (key)", "without the mean of each place"]
    if patches.cut is not None and patches.pixels is not None:
        words[1] += f"; {len(patches.cut)} as pictures"
    colours = place_colours(patches.places, patches.grid)
    both = (patches.points, patches.content)
    for axes, points, word, caption in zip(panels, both, words, patches.captions, strict=True):
        axes.scatter(points[:, 0], points[:, 1], s=7.0, c=colours, linewidths=0)
        axes.set_title(word)
        axes.set_xlabel(caption, fontsize=SMALL)
        _frame(axes)
    _draw_key(panels[0], patches.grid, patches.points)
    if patches.cut is not None and patches.pixels is not None:
        _pictures(panels[1], patches.content[patches.cut], patches.pixels, side=20)
    heading(figure, title)
    return figure


def place_colours(places: Array, grid: Sequence[int]) -> NDArray[np.float64]:
    """Return a colour (n, 3) for each place (n, 2), so that near places look alike.

    It is mixed bilinearly from the colours of the four corners.
    """
    top_left = np.array([0.0, 0.35, 0.75])
    top_right = np.array([0.1, 0.75, 0.5])
    bottom_left = np.array([0.8, 0.25, 0.5])
    bottom_right = np.array([0.95, 0.75, 0.1])
    share = np.asarray(places, dtype=float) / np.maximum(np.array(grid) - 1, 1)
    down = share[:, :1]
    across = share[:, 1:]
    top = (1 - across) * top_left + across * top_right
    bottom = (1 - across) * bottom_left + across * bottom_right
    colours: NDArray[np.float64] = (1 - down) * top + down * bottom
    return colours


def _draw_key(axes: Axes, grid: Sequence[int], points: Array) -> None:
    """Draw the colours of all places in the corner of the panel where they hide fewest points."""
    rows, columns = np.indices(grid)
    places = np.stack([rows.ravel(), columns.ravel()], 1)
    colours = place_colours(places, grid).reshape(*grid, 3)
    share = (points - points.min(0)) / np.maximum(np.ptp(points, axis=0), 1e-12)
    far = 1 - _KEY
    corners = [(far, far), (0.0, far), (far, 0.0), (0.0, 0.0)]
    hidden = []  # the number of points that the key would hide in each corner
    for corner in corners:
        distance_from_middle = np.abs(share - np.array(corner) - _KEY / 2)
        is_hidden = (distance_from_middle < _KEY / 2).all(1)
        hidden.append(int(is_hidden.sum()))
    left, bottom = corners[int(np.argmin(hidden))]
    key = axes.inset_axes((left, bottom, _KEY, _KEY))
    key.imshow(colours, aspect="auto")
    key.set(xticks=[], yticks=[])
    key.spines[:].set_visible(True)


@dataclass(frozen=True)
class Matches:
    """Two images and their most similar patches in descending order.

    first, second: (3, height, width) in [0, 1].
    sources, targets: (m, 2), the row and column of each matched patch of the first and the second
        image, from 0.
    similarity: (m,), the similarity of each match.
    grid: (rows, columns) of the patches of both images.
    """

    title: str
    first: Array
    second: Array
    sources: Array
    targets: Array
    similarity: Array
    grid: tuple[int, int]


@styled
def correspondences(pairs: Sequence[Matches], title: str) -> Figure:
    """Draw pairs of images side by side, with an arc for each of the best matches of patches.

    The colour of an arc is the similarity: lighter is greater, over the range of all arcs.
    """
    values = np.concatenate([pair.similarity[:_ARCS] for pair in pairs])
    low = float(values.min())
    high = float(values.max())
    ratio = pairs[0].first.shape[1] / pairs[0].first.shape[2]
    across = 2 if in_column() or len(pairs) == 1 else 4
    panel = min(2.6, (full_width() - 0.5) / across)
    drawn = board(
        title=f"{title}: similarity {low:.2f} (dark) to {high:.2f} (light)",
        count=2 * len(pairs),
        across=across,
        panel=(panel, panel * ratio),
        gap=(0.1, 0.28),
        margins=Margins(top=0.24),
    )
    for index, pair in enumerate(pairs):
        left, right = drawn.panels[2 * index : 2 * index + 2]
        for axes, picture in ((left, pair.first), (right, pair.second)):
            axes.imshow(enlarged(picture), extent=(0, pair.grid[1], pair.grid[0], 0), aspect="auto")
            axes.set(xlim=(0, pair.grid[1]), ylim=(pair.grid[0], 0))
        left.set_title(shorten(pair.title, int(2 * panel / 0.075)), loc="left")
        for index_of_match in range(min(_ARCS, len(pair.similarity))):
            source_row, source_column = pair.sources[index_of_match] + 0.5  # middles of patches
            target_row, target_column = pair.targets[index_of_match] + 0.5
            share = 1.0
            if high > low:
                share = (pair.similarity[index_of_match] - low) / (high - low)
            start = (source_column, source_row)
            end = (target_column, target_row)
            _draw_arc(left, right, start, end, colormaps[MAGNITUDE](share))
    without_frames(drawn.panels)
    return drawn.figure


def _draw_arc(
    left: Axes, right: Axes, start: tuple[float, float], end: tuple[float, float], colour: Rgba
) -> None:
    """Draw an arc between points (x, y) of two panels, with a dot at both ends."""
    arc = ConnectionPatch(
        start,
        end,
        "data",
        "data",
        axesA=left,
        axesB=right,
        linewidth=1.2,
        color=colour,
        clip_on=False,
        connectionstyle="arc3,rad=-0.12",  # straight lines in a row would overlap
    )
    right.add_artist(arc)
    for axes, point in ((left, start), (right, end)):
        axes.plot(
            *point, "o", color=colour, markersize=2.4, markeredgecolor="black", markeredgewidth=0.3
        )
