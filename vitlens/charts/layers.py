"""How a transformer works in one picture: a row for each layer, a column for each thing that is known of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from vitlens.charts import style
from vitlens.charts.overlay import POSITIVE, Array, enlarged, overlaid
from vitlens.charts.panels import Board, Margins, area, without_frames
from vitlens.uncertainty import Estimate

_TALL: Final = 4.4  # inch of all rows, which with titles and axes makes half a page
_ROW: Final = (0.345, 0.54)  # inch, the least and the most height of a row
_GAP: Final = 0.04  # inch between two thumbnails
_BETWEEN: Final = 0.2  # inch between two columns
_NAMES: Final = 0.52  # inch at the left for the names of stages and layers
_HEAD: Final = 0.52  # inch above the rows for the titles of the columns
_FOOT: Final = 0.4  # inch below the rows for the numbers of the axes
_LINE: Final = 0.116  # inch of a line of the smallest text
_SMALLEST: Final = 7.0  # points
_POINTS: Final = 72  # of an inch
_TINY: Final = 6.0  # points, of the names of heads in a picture
_NEAR_UNIFORM: Final = 80.0  # % of the distance of uniform attention, from which on that is drawn, too
_ALL: Final = 6  # heads of a layer up to which every one has a thumbnail
_LEAST: Final = 1.1  # inch of the column of maps
_WORDS: Final = 0.98  # inch for the words of a role
_LAYERS: Final = 24  # rows at most, in all blocks
_ROOM: Final = 0.08  # of the range of values, on both sides


@dataclass(frozen=True)
class HeadView:
    """One head of a layer. map (rows, columns): its attention on the image; distance: share of that of uniform
    attention; lost: points of accuracy lost without it; matters: True where the loss changes significantly without it.
    """

    head: int
    map: Array | None = None
    distance: float | None = None
    lost: Estimate | None = None
    matters: bool = False


@dataclass(frozen=True)
class Exemplar:
    """An image (3, height, width) that a head helps most; patch: (row, column) of `grid` through which it does so."""

    image: Array
    patch: tuple[int, int] | None = None
    grid: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class RoleView:
    """What one head of a layer does. exemplars: the images that it helps most; helps: their labels; words: the head's
    label; tested: True where that is tested."""

    head: int
    helps: tuple[str, ...]
    words: str
    tested: bool
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True)
class LayerView:
    """One layer. heads: the most important first; lens: accuracy of the logit lens after it."""

    layer: int
    stage: str
    heads: tuple[HeadView, ...]
    lens: Estimate | None = None
    role: RoleView | None = None


@dataclass(frozen=True)
class _Layout:
    """Where the rows of one block lie, in inches: y of the first, and the height of each."""

    board: Board
    rows: Sequence[LayerView]
    top: float
    height: float

    @property
    def side(self) -> float:
        """Return the side of a picture in a row."""
        return self.height - 2 * _GAP

    def middle(self, index: int) -> float:
        """Return the middle of a row."""
        return self.top + (index + 0.5) * self.height

    def write(self, x: float, y: float, words: str, **more: Any) -> None:
        """Write a text at a place in inches from the left and the top."""
        wide, tall = self.board.figure.get_size_inches()
        self.board.figure.text(x / wide, 1 - y / tall, words, **{"fontsize": _SMALLEST, "va": "center", **more})

    def rule(self, y: float, left: float, right: float, *, dark: bool) -> None:
        """Draw a horizontal line between two rows."""
        wide, tall = self.board.figure.get_size_inches()
        colour = style.GREY if dark else "#DDDDDD"
        across = (left / wide, right / wide)
        height = 1 - y / tall
        self.board.figure.add_artist(Line2D(across, (height, height), color=colour, linewidth=0.6, zorder=0))


_Draw: TypeAlias = Callable[[_Layout, float, float], None]


@dataclass(frozen=True)
class _Column:
    """A column of a block. wide: inch that it needs at least; grows: True where it takes what room is left."""

    title: str
    wide: float
    draw: _Draw
    grows: bool = False


@style.styled
def layers(rows: Sequence[LayerView], image: Array | None, chance: float | None, title: str) -> Figure:
    """Draw a row for each layer. image: on which the maps are, (3, height, width) in [0, 1]; chance: accuracy of
    guessing. What no layer has is left out; of more layers than there is room for, evenly spaced ones are drawn."""
    blocks = 2 if style.in_column() else 1
    rows = _spaced(rows, _LAYERS // blocks)
    height = float(np.clip(_TALL / len(rows), *_ROW))
    room = style.TALL - style.wrapped_title(title, style.full_width())[1] - Margins().top
    height = min(height, (room / blocks - _HEAD - _FOOT) / len(rows))
    columns = _columns(rows, image, height - 2 * _GAP, chance)
    parts = [columns] if blocks == 1 else [columns[:3], columns[3:]]
    parts = [part for part in parts if part]
    block = _HEAD + len(rows) * height + _FOOT
    board = area(title=title, wide=style.full_width() - 0.12, tall=len(parts) * block, margins=Margins(bottom=0.0))
    for number_of_block, part in enumerate(parts):
        layout = _Layout(board, rows, board.top + number_of_block * block + _HEAD, height)
        _name_rows(layout)
        if image is not None and number_of_block == 0:
            side = _HEAD - 2 * _GAP
            axes = board.place(board.left + _NAMES - side - _GAP, layout.top - _HEAD + _GAP, side, side)
            axes.imshow(enlarged(np.asarray(image, float)))
            without_frames([axes])
        _draw_columns(layout, part)
    return board.figure


def _spaced(rows: Sequence[LayerView], most: int) -> Sequence[LayerView]:
    """Return at most so many layers, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return rows
    return [rows[index] for index in np.linspace(0, len(rows) - 1, most).round().astype(int)]


def _columns(rows: Sequence[LayerView], image: Array | None, side: float, chance: float | None) -> list[_Column]:
    """Return the columns of what is known of at least one layer."""
    heads = [head for row in rows for head in row.heads]
    columns = []
    if any(head.map is not None for head in heads):
        columns.append(_thumbnails(rows, image, side))
    if any(head.distance is not None for head in heads):
        columns.append(_Column("attention\ndistance", 0.55, _draw_distance, grows=True))
    lens = next((row.lens for row in rows if row.lens is not None), None)
    if lens is not None:
        words = "labels read by\nthe logit lens"

        def draw_lens(layout: _Layout, left: float, wide: float) -> None:
            _draw_lens(layout, left, wide, chance)

        columns.append(_Column(words, 0.55, draw_lens, grows=True))
    lost = next((head.lost for head in heads if head.lost is not None), None)
    if lost is not None:
        words = "accuracy lost\nwithout a head"
        columns.append(_Column(words, 0.6, _draw_lost, grows=True))
    if any(row.role is not None for row in rows):
        most = max((len(row.role.exemplars) for row in rows if row.role is not None), default=0)
        pictures = most * (side + _GAP)
        titles = "what one head does" if not most else "images that one head of the\nlayer helps most, and its label"
        columns.append(_Column(titles, pictures + _WORDS, lambda layout, left, _: _draw_roles(layout, left, pictures)))
    return columns


def _of(estimate: Estimate) -> str:
    """Return the number of images of an estimate, for the label of an axis."""
    return "" if estimate.n is None else f", n = {estimate.n:,}"


def _draw_columns(layout: _Layout, columns: Sequence[_Column]) -> None:
    """Draw columns side by side; those that grow share the room that is left."""
    left = layout.board.left + _NAMES
    room = layout.board.right - left - sum(column.wide for column in columns) - _BETWEEN * (len(columns) - 1)
    growing = sum(column.grows for column in columns)
    for column in columns:
        wide = column.wide + (room / growing if column.grows else 0.0)
        x, side = (left + wide / 2, "center") if column.grows else (left, "left")
        layout.write(x, layout.top - 0.06, column.title, va="bottom", ha=side)
        column.draw(layout, left, wide)
        left += wide + _BETWEEN


def _name_rows(layout: _Layout) -> None:
    """Write the names of layers and of stages, and draw lines between them."""
    left = layout.board.left
    right = layout.board.right
    stages = [row.stage for row in layout.rows]
    for index, row in enumerate(layout.rows):
        layout.write(left + _NAMES - 0.08, layout.middle(index), f"L{row.layer}", ha="right", fontsize=style.SMALL)
        starts = index == 0 or stages[index - 1] != row.stage
        layout.rule(layout.top + index * layout.height, left if starts else left + 0.2, right, dark=starts)
        if starts:
            count = stages.count(row.stage)
            middle = layout.top + (index + count / 2) * layout.height
            layout.write(left + 0.09, middle, row.stage, rotation=90, ha="center", fontsize=style.SMALL)
    layout.rule(layout.top + len(layout.rows) * layout.height, left, right, dark=True)


def _thumbnails(rows: Sequence[LayerView], image: Array | None, side: float) -> _Column:
    """Return the column of the maps of heads: of all, or of as many of the most important ones as there is room for."""
    most = max(len(row.heads) for row in rows)
    room, few = (1.1, 3) if style.in_column() else (1.8, _ALL)
    every = most <= few
    shown = most if every else max(1, int((room + _GAP) / (side + _GAP)))
    side = min(side, (room + _GAP) / shown - _GAP)
    title = (
        "attention of each head (red: most)"
        if every
        else f"attention (red: most) of the {shown} most important of {most} heads"
    )

    def draw(layout: _Layout, left: float, _: float) -> None:
        for index, row in enumerate(layout.rows):
            heads = sorted(row.heads[:shown], key=lambda head: head.head)
            for place, head in enumerate(heads):
                x = left + place * (side + _GAP)
                if every and index == 0:
                    layout.write(x + side / 2, layout.top - 0.07, f"H{head.head}", ha="center")
                if head.map is None:
                    continue
                axes = layout.board.place(x, layout.middle(index) - side / 2, side, side)
                _draw_map(axes, image, head.map)
                if not every:
                    _name_inside(axes, f"H{head.head}")

    wide = shown * (side + _GAP) - _GAP
    lines = _within(title, max(wide, _LEAST), 2 if every else 3)
    return _Column("\n".join([*lines, ""] if every else lines), max(wide, _LEAST), draw)


def _draw_map(axes: Axes, image: Array | None, values: Array) -> None:
    """Draw a map with its own colours over the image, or alone."""
    values = np.asarray(values, float)
    if image is None:
        axes.imshow(values, cmap=POSITIVE)
    else:
        axes.imshow(overlaid(np.asarray(image, float), values, signed=False))
    without_frames([axes])


def _name_inside(axes: Axes, name: str) -> None:
    plate: dict[str, Any] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0.0, "pad": 0.6}
    place: dict[str, Any] = {"x": 0.03, "y": 0.03, "ha": "left", "va": "bottom", "transform": axes.transAxes}
    axes.text(s=name, fontsize=_TINY, bbox=plate, **place)


def _panel(layout: _Layout, left: float, wide: float, label: str) -> Axes:
    """Return axes across all rows of a block, whose y is the number of the row."""
    axes = layout.board.place(left, layout.top, wide, len(layout.rows) * layout.height)
    axes.set_ylim(len(layout.rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.patch.set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(3, min_n_ticks=2))
    axes.grid(axis="x")
    axes.set_xlabel(label, fontsize=_SMALLEST, labelpad=1.5)
    return axes


def _limit(axes: Axes, values: Sequence[float], *, least: float | None = None, most: float | None = None) -> None:
    """Let x begin and end near the values, within what is possible."""
    room = _ROOM * (max(values) - min(values)) or 1.0
    low = min(values) - room
    high = max(values) + room
    axes.set_xlim(low if least is None else max(low, least), high if most is None else min(high, most))


def _reference(axes: Axes, place: float, name: str) -> None:
    """Draw a dashed vertical line with its name at the lower end."""
    axes.axvline(place, color=style.GREY, linestyle="--", linewidth=0.9)
    lower: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "left", "va": "bottom"}
    axes.text(place, 0.01, f" {name}", fontsize=_TINY, color=style.GREY, **lower)


def _draw_distance(layout: _Layout, left: float, wide: float) -> None:
    """Draw a dot for each head, the line of their means, and where uniform attention is."""
    axes = _panel(layout, left, wide, "% of uniform")
    every = []
    means = []
    places = []
    for index, row in enumerate(layout.rows):
        known = [100 * head.distance for head in row.heads if head.distance is not None]
        if known:
            axes.plot(known, [index] * len(known), "o", color=style.GREY, alpha=0.6, markersize=3, markeredgewidth=0)
            means.append(float(np.mean(known)))
            places.append(index)
            every += known
    axes.plot(means, places, color=style.BLUE, marker="|", markersize=7, linewidth=1.0)
    if max(every) > _NEAR_UNIFORM:
        _reference(axes, 100.0, "uniform")
        every.append(100.0)
    _limit(axes, every, least=0.0)


def _draw_lens(layout: _Layout, left: float, wide: float, chance: float | None) -> None:
    """Draw the accuracy after each layer with its interval, and chance."""
    known = [(index, row.lens) for index, row in enumerate(layout.rows) if row.lens is not None]
    axes = _panel(layout, left, wide, f"%{_of(known[0][1])}")
    values = [100 * lens.value for _, lens in known]
    axes.plot(values, [index for index, _ in known], color=style.BLUE, marker="o", markersize=3.5, linewidth=1.0)
    ends = [*values]
    for index, lens in known:
        if lens.low is not None and lens.high is not None:
            axes.hlines(index, 100 * lens.low, 100 * lens.high, color=style.BLUE, linewidth=1.0)
            ends += [100 * lens.low, 100 * lens.high]
    if chance is not None:
        _reference(axes, 100 * chance, "chance")
        ends.append(100 * chance)
    _limit(axes, ends, least=0.0, most=100.0)


def _draw_lost(layout: _Layout, left: float, wide: float) -> None:
    """Draw a dot for each head, dark where the loss changes significantly; the largest with its name and interval."""
    heads = [head for row in layout.rows for head in row.heads]
    of_one = next(head.lost for head in heads if head.lost is not None)
    axes = _panel(layout, left, wide, f"points{_of(of_one)}")
    _reference(axes, 0.0, "")
    ends = [0.0]
    for index, row in enumerate(layout.rows):
        known = [(head.lost, head) for head in row.heads if head.lost is not None]
        if not known:
            continue
        for lost, head in known:
            colour = style.VERMILLION if head.matters else "#BBBBBB"
            axes.plot(lost.value, index + 0.12, "o", color=colour, markersize=3.5, markeredgewidth=0, zorder=3)
            ends.append(lost.value)
        largest, head = max(known, key=lambda pair: pair[0].value)
        if largest.low is not None and largest.high is not None:
            axes.hlines(index + 0.12, largest.low, largest.high, color=style.GREY, linewidth=1.0)
            ends += [largest.low, largest.high]
        axes.text(largest.value, index - 0.08, f"H{head.head}", fontsize=_TINY, ha="center", va="bottom")
    _limit(axes, ends, least=-100.0, most=100.0)


def _draw_roles(layout: _Layout, left: float, pictures: float) -> None:
    """Draw the exemplars of one head of each layer, then its label; `pictures`: inch of the exemplars."""
    lines = max(2, int(layout.height / _LINE))
    for index, row in enumerate(layout.rows):
        if row.role is None:
            continue
        y = layout.middle(index)
        side = layout.side
        for place, exemplar in enumerate(row.role.exemplars):
            axes = layout.board.place(left + place * (side + _GAP), y - side / 2, side, side)
            _draw_exemplar(axes, exemplar)
        words = _within(row.role.words, _WORDS, lines - 1)
        helped = _helped(row.role, lines - len(words))
        written = [*helped, *words]
        colours = ["black"] * len(helped) + [style.BLUE if row.role.tested else style.GREY] * len(words)
        for number, (line, colour) in enumerate(zip(written, colours)):
            height = y + (number - (len(written) - 1) / 2) * _LINE
            layout.write(left + pictures + 0.03, height, line, color=colour)


def _helped(role: RoleView, lines: int) -> list[str]:
    """Return the head's name with the labels of its exemplars, or with the first one where not all have room."""
    name = f"H{role.head}"
    if not role.helps:
        return [name]
    every = _within(f"{name} helps {' and '.join(role.helps)}", _WORDS, lines)
    cut = any(line.endswith("…") for line in every)
    return _within(f"{name} helps {role.helps[0]}", _WORDS, lines) if cut else every


def _within(text: str, wide: float, lines: int) -> list[str]:
    """Return a text in at most so many lines of this width in inches, shortened at its end where it is longer."""
    found = [""]
    for word in style.drawable(text).split():
        longer = f"{found[-1]} {word}".strip()
        if not found[-1] or _width(longer) <= wide:
            found[-1] = longer
        else:
            found.append(word)
    kept = found[: lines - 1] + ([" ".join(found[lines - 1 :])] if len(found) >= lines else [])
    return [_shortened(line, wide) for line in kept]


def _shortened(line: str, wide: float) -> str:
    """Return a line cut to a width in inches, ending in an ellipsis."""
    length = len(line)
    while length > 1 and _width(style.shortened(line, length)) > wide:
        length -= 1
    return style.shortened(line, length) if line else line


def _width(text: str) -> float:
    """Return the width of the smallest text, inch."""
    return sum(map(_letter_width, text))


@cache
def _letter_width(letter: str) -> float:
    font = FontProperties(family=list(style.FAMILIES), size=_SMALLEST)
    between = TextPath((0, 0), f"|{letter}|", prop=font).get_extents().width
    alone = TextPath((0, 0), "||", prop=font).get_extents().width
    return float(between - alone) / _POINTS


def _draw_exemplar(axes: Axes, exemplar: Exemplar) -> None:
    """Draw an image with the patch through which the head adds most."""
    image = np.asarray(exemplar.image, float)
    axes.imshow(enlarged(image), extent=(0, 1, 1, 0), aspect="auto")
    without_frames([axes])
    if exemplar.patch is not None:
        (row, column), (rows, columns) = exemplar.patch, exemplar.grid
        for colour, thickness in (("black", 1.6), ("white", 0.8)):
            box = (column / columns, row / rows), 1 / columns, 1 / rows
            axes.add_patch(Rectangle(*box, fill=False, edgecolor=colour, linewidth=thickness, clip_on=False))
