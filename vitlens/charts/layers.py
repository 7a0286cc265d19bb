"""One picture of a transformer: a row for each layer, a column for each kind of measurement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
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
_LEAST_ROW: Final = 0.345  # inch, the least height of a row
_MOST_ROW: Final = 0.54  # inch, the most height of a row
_GAP: Final = 0.04  # inch between two thumbnails
_BETWEEN: Final = 0.2  # inch between two columns
_NAMES: Final = 0.52  # inch at the left for the names of stages and layers
_HEAD: Final = 0.52  # inch above the rows for the titles of the columns
_FOOT: Final = 0.4  # inch below the rows for the numbers of the axes
_LINE: Final = 0.116  # inch of a line of the smallest text
_SMALLEST: Final = 7.0  # points
_POINTS: Final = 72  # of an inch
_TINY: Final = 6.0  # points, of the names of heads in a picture
# distance of a head, % of that of uniform attention, from which on a line at 100 % is drawn
_NEAR_UNIFORM: Final = 80.0
_ALL_HEADS: Final = 6  # heads of a layer up to which every one has a thumbnail
_ALL_HEADS_IN_COLUMN: Final = 3  # the same in a figure of one column
_ROOM_OF_MAPS: Final = 1.8  # inch for the thumbnails of a layer
_ROOM_OF_MAPS_IN_COLUMN: Final = 1.1  # the same in a figure of one column
_LEAST_OF_MAPS: Final = 1.1  # inch of the column of maps, at least
_WORDS: Final = 0.98  # inch for the words of a role
_LAYERS: Final = 24  # rows at most, in all blocks
_ROOM: Final = 0.08  # left free on both sides of the values, as a share of their range


@dataclass(frozen=True)
class HeadView:
    """One head of a layer.

    head: its number.
    map: (rows, columns), its attention on the image.
    distance: its attention distance as a share of that of uniform attention.
    lost: percentage points of accuracy lost without it.
    matters: True if the loss changes significantly without it.
    """

    head: int
    map: Array | None = None
    distance: float | None = None
    lost: Estimate | None = None
    matters: bool = False


@dataclass(frozen=True)
class Exemplar:
    """An image that a head helps most.

    image: (3, height, width).
    patch: (row, column) of the patch through which the head adds most, None if it is not known.
    grid: (rows, columns) of patches.
    """

    image: Array
    patch: tuple[int, int] | None = None
    grid: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class RoleView:
    """The role of one head of a layer.

    head: the number of the head.
    helps: the labels of the images that it helps most.
    words: the head's label.
    tested: True if the label is tested.
    exemplars: the images that it helps most.
    """

    head: int
    helps: tuple[str, ...]
    words: str
    tested: bool
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True)
class LayerView:
    """One layer.

    layer: its number.
    stage: the name of its stage.
    heads: its heads, the most important first.
    lens: accuracy of the logit lens after it.
    role: the role of one of its heads.
    """

    layer: int
    stage: str
    heads: tuple[HeadView, ...]
    lens: Estimate | None = None
    role: RoleView | None = None


@dataclass(frozen=True)
class _Layout:
    """The rows of one block of a figure.

    board: the figure.
    rows: the layers, one per row.
    top: the y of the first row, inch.
    height: the height of each row, inch.
    """

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
        self.board.figure.text(
            x / wide, 1 - y / tall, words, **{"fontsize": _SMALLEST, "va": "center", **more}
        )

    def rule(self, y: float, left: float, right: float, *, dark: bool) -> None:
        """Draw a horizontal line between two rows."""
        wide, tall = self.board.figure.get_size_inches()
        colour = style.GREY if dark else "#DDDDDD"
        across = (left / wide, right / wide)
        height = 1 - y / tall
        self.board.figure.add_artist(
            Line2D(across, (height, height), color=colour, linewidth=0.6, zorder=0)
        )


_Draw: TypeAlias = Callable[[_Layout, float, float], None]  # layout, left edge and width, inch


@dataclass(frozen=True)
class _Column:
    """A column of a block.

    wide: its least width, inch.
    draw: draws its cells in all rows.
    grows: True if it also takes the room that is left.
    """

    title: str
    wide: float
    draw: _Draw
    grows: bool = False


@style.styled
def layers(
    rows: Sequence[LayerView], image: Array | None, chance: float | None, title: str
) -> Figure:
    """Draw a row for each layer, or for evenly spaced layers if there are too many.

    A column that is empty for all layers is left out.

    image: (3, height, width) in [0, 1], under the maps.
    chance: the accuracy of guessing.
    """
    blocks = 2 if style.in_column() else 1
    rows = _spaced_layers(rows, _LAYERS // blocks)
    row_height = float(np.clip(_TALL / len(rows), _LEAST_ROW, _MOST_ROW))
    _, title_height = style.wrapped_title(title, style.full_width())
    room = style.TALL - title_height - Margins().top
    row_height = min(row_height, (room / blocks - _HEAD - _FOOT) / len(rows))
    columns = _columns(rows, image, row_height - 2 * _GAP, chance)
    column_groups = [columns]  # the columns of each block
    if blocks == 2:
        column_groups = [columns[:3], columns[3:]]  # of five columns at most
    column_groups = [group for group in column_groups if group]
    block_height = _HEAD + len(rows) * row_height + _FOOT
    board = area(
        title=title,
        wide=style.full_width() - 0.12,
        tall=len(column_groups) * block_height,
        margins=Margins(bottom=0.0),
    )
    for index, group in enumerate(column_groups):
        layout = _Layout(board, rows, board.top + index * block_height + _HEAD, row_height)
        _name_rows(layout)
        if image is not None and index == 0:
            _draw_image(layout, image)
        _draw_columns(layout, group)
    return board.figure


def _draw_image(layout: _Layout, image: Array) -> None:
    """Draw the image in the corner above the names of the layers."""
    side = _HEAD - 2 * _GAP
    x = layout.board.left + _NAMES - side - _GAP
    axes = layout.board.place(x, layout.top - _HEAD + _GAP, side, side)
    axes.imshow(enlarged(np.asarray(image, float)))
    without_frames([axes])


def _spaced_layers(rows: Sequence[LayerView], most: int) -> Sequence[LayerView]:
    """Return at most `most` layers, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return rows
    indices = np.linspace(0, len(rows) - 1, most).round().astype(int)
    return [rows[index] for index in indices]


def _columns(
    rows: Sequence[LayerView], image: Array | None, side: float, chance: float | None
) -> list[_Column]:
    """Return the columns that have a value for at least one layer."""
    heads = list(chain.from_iterable(row.heads for row in rows))
    columns = []
    if any(head.map is not None for head in heads):
        columns.append(_thumbnails(rows, image, side))
    if any(head.distance is not None for head in heads):
        columns.append(_Column("attention\ndistance", wide=0.55, draw=_draw_distance, grows=True))
    if any(row.lens is not None for row in rows):

        def draw_lens(layout: _Layout, left: float, wide: float) -> None:
            _draw_lens(layout, left, wide, chance)

        columns.append(
            _Column("labels read by\nthe logit lens", wide=0.55, draw=draw_lens, grows=True)
        )
    if any(head.lost is not None for head in heads):
        columns.append(
            _Column("accuracy lost\nwithout a head", wide=0.6, draw=_draw_lost, grows=True)
        )
    roles = [row.role for row in rows if row.role is not None]
    if roles:
        columns.append(_roles(roles, side))
    return columns


def _roles(roles: Sequence[RoleView], side: float) -> _Column:
    """Return the column of the roles of heads, as wide as the role with most exemplars."""
    most = max(len(role.exemplars) for role in roles)
    pictures = most * (side + _GAP)
    title = "what one head does"
    if most:
        title = "images that one head of the\nlayer helps most, and its label"

    def draw(layout: _Layout, left: float, _: float) -> None:
        _draw_roles(layout, left, pictures)

    return _Column(title, wide=pictures + _WORDS, draw=draw)


def _with_n(estimate: Estimate) -> str:
    """Return the number of images of an estimate, as the end of an axis label."""
    if estimate.n is None:
        return ""
    return f", n = {estimate.n:,}"


def _draw_columns(layout: _Layout, columns: Sequence[_Column]) -> None:
    """Draw columns side by side; those that grow share the room that is left."""
    left = layout.board.left + _NAMES
    room = (
        layout.board.right
        - left
        - sum(column.wide for column in columns)
        - _BETWEEN * (len(columns) - 1)
    )
    growing = sum(column.grows for column in columns)  # their number
    for column in columns:
        wide = column.wide
        if column.grows:
            wide += room / growing
            layout.write(left + wide / 2, layout.top - 0.06, column.title, va="bottom", ha="center")
        else:
            layout.write(left, layout.top - 0.06, column.title, va="bottom", ha="left")
        column.draw(layout, left, wide)
        left += wide + _BETWEEN


def _name_rows(layout: _Layout) -> None:
    """Write the names of layers and of stages, and draw lines between them."""
    left = layout.board.left
    right = layout.board.right
    stages = [row.stage for row in layout.rows]
    for index, row in enumerate(layout.rows):
        layout.write(
            left + _NAMES - 0.08,
            layout.middle(index),
            f"L{row.layer}",
            ha="right",
            fontsize=style.SMALL,
        )
        upper_edge = layout.top + index * layout.height
        begins_stage = index == 0 or stages[index - 1] != row.stage
        if not begins_stage:
            layout.rule(upper_edge, left + 0.2, right, dark=False)
            continue
        layout.rule(upper_edge, left, right, dark=True)
        middle = layout.top + (index + stages.count(row.stage) / 2) * layout.height
        layout.write(left + 0.09, middle, row.stage, rotation=90, ha="center", fontsize=style.SMALL)
    layout.rule(layout.top + len(layout.rows) * layout.height, left, right, dark=True)


def _thumbnails(rows: Sequence[LayerView], image: Array | None, side: float) -> _Column:
    """Return the column of the maps of heads.

    If they are too many, as many of the most important ones are drawn as there is room for.
    """
    heads = max(len(row.heads) for row in rows)
    room = _ROOM_OF_MAPS
    most = _ALL_HEADS
    if style.in_column():
        room = _ROOM_OF_MAPS_IN_COLUMN
        most = _ALL_HEADS_IN_COLUMN
    has_all = heads <= most
    count = heads
    if not has_all:
        count = max(1, int((room + _GAP) / (side + _GAP)))
    side = min(side, (room + _GAP) / count - _GAP)
    wide = max(count * (side + _GAP) - _GAP, _LEAST_OF_MAPS)
    if has_all:
        lines = _fit("attention of each head (red: most)", wide, lines=2)
        lines.append("")  # the line of the names of heads
    else:
        lines = _fit(
            f"attention (red: most) of the {count} most important of {heads} heads", wide, lines=3
        )

    def draw(layout: _Layout, left: float, _: float) -> None:
        for index, row in enumerate(layout.rows):
            row_heads = sorted(row.heads[:count], key=lambda head: head.head)
            for place, head in enumerate(row_heads):
                x = left + place * (side + _GAP)
                if has_all and index == 0:
                    layout.write(x + side / 2, layout.top - 0.07, f"H{head.head}", ha="center")
                if head.map is None:
                    continue
                axes = layout.board.place(x, layout.middle(index) - side / 2, side, side)
                _draw_map(axes, image, head.map)
                if not has_all:
                    _name_inside(axes, f"H{head.head}")

    return _Column("\n".join(lines), wide=wide, draw=draw)


def _draw_map(axes: Axes, image: Array | None, values: Array) -> None:
    """Draw a map over the image, or without one."""
    values = np.asarray(values, float)
    if image is None:
        axes.imshow(values, cmap=POSITIVE)
    else:
        axes.imshow(overlaid(np.asarray(image, float), values, signed=False))
    without_frames([axes])


def _name_inside(axes: Axes, name: str) -> None:
    plate: dict[str, Any] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0.0, "pad": 0.6}
    place: dict[str, Any] = {
        "x": 0.03,
        "y": 0.03,
        "ha": "left",
        "va": "bottom",
        "transform": axes.transAxes,
    }
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


def _limit(
    axes: Axes, values: Sequence[float], *, least: float | None = None, most: float | None = None
) -> None:
    """Let x begin and end near the values, within what is possible."""
    room = _ROOM * (max(values) - min(values))
    if room == 0:  # equal values still need a range
        room = 1.0
    low = min(values) - room
    high = max(values) + room
    if least is not None:
        low = max(low, least)
    if most is not None:
        high = min(high, most)
    axes.set_xlim(low, high)


def _reference(axes: Axes, place: float, name: str) -> None:
    """Draw a dashed vertical line with its name at the lower end."""
    axes.axvline(place, color=style.GREY, linestyle="--", linewidth=0.9)
    lower: dict[str, Any] = {
        "transform": axes.get_xaxis_transform(),
        "rotation": 90,
        "ha": "left",
        "va": "bottom",
    }
    axes.text(place, 0.01, f" {name}", fontsize=_TINY, color=style.GREY, **lower)


def _draw_distance(layout: _Layout, left: float, wide: float) -> None:
    """Draw a dot for each head, the line of their means, and uniform attention if it is near."""
    axes = _panel(layout, left, wide, "% of uniform")
    values = []
    means = []
    places = []
    for index, row in enumerate(layout.rows):
        distances = [100 * head.distance for head in row.heads if head.distance is not None]
        if distances:
            axes.plot(
                distances,
                [index] * len(distances),
                "o",
                color=style.GREY,
                alpha=0.6,
                markersize=3,
                markeredgewidth=0,
            )
            means.append(float(np.mean(distances)))
            places.append(index)
            values += distances
    axes.plot(means, places, color=style.BLUE, marker="|", markersize=7, linewidth=1.0)
    if max(values) > _NEAR_UNIFORM:
        _reference(axes, 100.0, "uniform")
        values.append(100.0)
    _limit(axes, values, least=0.0)


def _draw_lens(layout: _Layout, left: float, wide: float, chance: float | None) -> None:
    """Draw the accuracy after each layer with its interval, and chance."""
    accuracies = {index: row.lens for index, row in enumerate(layout.rows) if row.lens is not None}
    first_accuracy = next(iter(accuracies.values()))  # all are of the same images
    axes = _panel(layout, left, wide, f"%{_with_n(first_accuracy)}")
    values = [100 * lens.value for lens in accuracies.values()]
    axes.plot(values, list(accuracies), color=style.BLUE, marker="o", markersize=3.5, linewidth=1.0)
    ends = list(values)
    for index, lens in accuracies.items():
        if lens.low is not None and lens.high is not None:
            axes.hlines(index, 100 * lens.low, 100 * lens.high, color=style.BLUE, linewidth=1.0)
            ends += [100 * lens.low, 100 * lens.high]
    if chance is not None:
        _reference(axes, 100 * chance, "chance")
        ends.append(100 * chance)
    _limit(axes, ends, least=0.0, most=100.0)


def _draw_lost(layout: _Layout, left: float, wide: float) -> None:
    """Draw a dot for each head, red if the loss changes significantly without it.

    The head of the largest loss of accuracy in a row has its name and its interval.
    """
    losses_by_row = []
    for row in layout.rows:
        losses_by_row.append([(head.lost, head) for head in row.heads if head.lost is not None])
    first_loss, _ = next(chain.from_iterable(losses_by_row))  # all are of the same images
    axes = _panel(layout, left, wide, f"points{_with_n(first_loss)}")
    _reference(axes, 0.0, name="")
    ends = [0.0]
    for index, losses in enumerate(losses_by_row):
        if not losses:
            continue
        dot_y = index + 0.12  # a little lower than the middle of the row, below the name
        for lost, head in losses:
            colour = style.VERMILLION if head.matters else "#BBBBBB"
            axes.plot(
                lost.value,
                dot_y,
                "o",
                color=colour,
                markersize=3.5,
                markeredgewidth=0,
                zorder=3,
            )
            ends.append(lost.value)
        largest, head_lost_most = max(losses, key=lambda loss_and_head: loss_and_head[0].value)
        if largest.low is not None and largest.high is not None:
            axes.hlines(dot_y, largest.low, largest.high, color=style.GREY, linewidth=1.0)
            ends += [largest.low, largest.high]
        name = f"H{head_lost_most.head}"
        axes.text(largest.value, index - 0.08, name, fontsize=_TINY, ha="center", va="bottom")
    _limit(axes, ends, least=-100.0, most=100.0)


def _draw_roles(layout: _Layout, left: float, pictures: float) -> None:
    """Draw the exemplars of one head of each layer, then its label.

    pictures: the width of the exemplars, inch.
    """
    lines = max(2, int(layout.height / _LINE))
    for index, row in enumerate(layout.rows):
        if row.role is None:
            continue
        y = layout.middle(index)
        side = layout.side
        for place, exemplar in enumerate(row.role.exemplars):
            axes = layout.board.place(left + place * (side + _GAP), y - side / 2, side, side)
            _draw_exemplar(axes, exemplar)
        words = _fit(row.role.words, _WORDS, lines=lines - 1)
        helped = _labelled_name(row.role, lines - len(words))
        colour_of_label = style.BLUE if row.role.tested else style.GREY
        texts = [(line, "black") for line in helped]
        texts += [(line, colour_of_label) for line in words]
        middle_line = (len(texts) - 1) / 2  # the number of the line at the middle of the row
        for number, (line, colour) in enumerate(texts):
            line_y = y + (number - middle_line) * _LINE
            layout.write(left + pictures + 0.03, line_y, line, color=colour)


def _labelled_name(role: RoleView, lines: int) -> list[str]:
    """Return the head's name with the labels of its exemplars, in at most `lines` lines.

    If not all labels have room, only the first one is there.
    """
    name = f"H{role.head}"
    if not role.helps:
        return [name]
    all_labels = _fit(f"{name} helps {' and '.join(role.helps)}", _WORDS, lines=lines)
    if any(line.endswith("…") for line in all_labels):
        return _fit(f"{name} helps {role.helps[0]}", _WORDS, lines=lines)
    return all_labels


def _fit(text: str, wide: float, *, lines: int) -> list[str]:
    """Break a text into at most `lines` lines of this width in inches.

    The last one is shortened.
    """
    broken = [""]
    for word in style.drawable(text).split():
        longer = f"{broken[-1]} {word}".strip()
        if not broken[-1] or _width(longer) <= wide:
            broken[-1] = longer
        else:
            broken.append(word)
    if len(broken) > lines:  # the last line takes all words that are left
        broken[lines - 1 :] = [" ".join(broken[lines - 1 :])]
    return [_shorten(line, wide) for line in broken]


def _shorten(line: str, wide: float) -> str:
    """Return a line cut to a width in inches, ending in an ellipsis."""
    if not line:
        return line
    length = len(line)
    while length > 1 and _width(style.shorten(line, length)) > wide:
        length -= 1
    return style.shorten(line, length)


def _width(text: str) -> float:
    """Return the width of the smallest text, inch."""
    return sum(map(_letter_width, text))


@cache
def _letter_width(letter: str) -> float:
    """Return the width of a letter of the smallest text, inch, with the space around it."""
    font = FontProperties(family=list(style.FAMILIES), size=_SMALLEST)
    with_letter = TextPath((0, 0), f"|{letter}|", prop=font).get_extents().width
    without_letter = TextPath((0, 0), "||", prop=font).get_extents().width
    return float(with_letter - without_letter) / _POINTS


def _draw_exemplar(axes: Axes, exemplar: Exemplar) -> None:
    """Draw an image with the patch through which the head adds most."""
    image = np.asarray(exemplar.image, float)
    axes.imshow(enlarged(image), extent=(0, 1, 1, 0), aspect="auto")
    without_frames([axes])
    if exemplar.patch is None:
        return
    row, column = exemplar.patch
    rows, columns = exemplar.grid
    corner = (column / columns, row / rows)
    for colour, thickness in (("black", 1.6), ("white", 0.8)):
        outline = Rectangle(
            corner,
            1 / columns,
            1 / rows,
            fill=False,
            edgecolor=colour,
            linewidth=thickness,
            clip_on=False,
        )
        axes.add_patch(outline)
