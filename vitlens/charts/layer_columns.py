"""Columns of the picture of a transformer: a kind of measurement, drawn for each layer."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from vitlens.charts import style
from vitlens.charts.fitted_text import SMALLEST, fit
from vitlens.charts.layer_layout import GAP, Column, Layout
from vitlens.charts.layer_views import Exemplar, LayerView, RoleView
from vitlens.charts.overlay import POSITIVE, Array, enlarged, overlaid
from vitlens.charts.panels import without_frames
from vitlens.uncertainty import Estimate

_LINE: Final = 0.116  # inch of a line of the smallest text
_TINY: Final = 6.0  # points, of the names of heads in a picture
# distance of a head, % of that of uniform attention, from which on a line at 100 % is drawn
_NEAR_UNIFORM: Final = 80.0
_ALL_HEADS: Final = 6  # heads of a layer up to which every one has a thumbnail
_ALL_HEADS_IN_COLUMN: Final = 3  # the same in a figure of one column
_ROOM_OF_MAPS: Final = 1.8  # inch for the thumbnails of a layer
_ROOM_OF_MAPS_IN_COLUMN: Final = 1.1  # the same in a figure of one column
_LEAST_OF_MAPS: Final = 1.1  # inch of the column of maps, at least
_WORDS: Final = 0.98  # inch for the words of a role
_ROOM: Final = 0.08  # left free on both sides of the values, as a share of their range


def layer_columns(
    rows: Sequence[LayerView], image: Array | None, side: float, chance: float | None
) -> list[Column]:
    """Return the columns that have a value for at least one layer."""
    heads = list(chain.from_iterable(row.heads for row in rows))
    columns = []
    if any(head.map is not None for head in heads):
        columns.append(_thumbnails(rows, image, side))
    if any(head.distance is not None for head in heads):
        columns.append(Column("attention\ndistance", wide=0.55, draw=_draw_distance, grows=True))
    if any(row.lens is not None for row in rows):

        def draw_lens(layout: Layout, left: float, wide: float) -> None:
            _draw_lens(layout, left, wide, chance)

        columns.append(
            Column("labels read by\nthe logit lens", wide=0.55, draw=draw_lens, grows=True)
        )
    if any(head.lost is not None for head in heads):
        columns.append(
            Column("accuracy lost\nwithout a head", wide=0.6, draw=_draw_lost, grows=True)
        )
    roles = [row.role for row in rows if row.role is not None]
    if roles:
        columns.append(_roles(roles, side))
    return columns


def _thumbnails(rows: Sequence[LayerView], image: Array | None, side: float) -> Column:
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
        count = max(1, int((room + GAP) / (side + GAP)))
    side = min(side, (room + GAP) / count - GAP)
    wide = max(count * (side + GAP) - GAP, _LEAST_OF_MAPS)
    if has_all:
        lines = fit("attention of each head (red: most)", wide, lines=2)
        lines.append("")  # the line of the names of heads
    else:
        lines = fit(
            f"attention (red: most) of the {count} most important of {heads} heads", wide, lines=3
        )

    def draw(layout: Layout, left: float, _: float) -> None:
        for index, row in enumerate(layout.rows):
            row_heads = sorted(row.heads[:count], key=lambda head: head.head)
            for place, head in enumerate(row_heads):
                x = left + place * (side + GAP)
                if has_all and index == 0:
                    layout.write(x + side / 2, layout.top - 0.07, f"H{head.head}", ha="center")
                if head.map is None:
                    continue
                axes = layout.board.place(x, layout.middle(index) - side / 2, side, side)
                _draw_map(axes, image, head.map)
                if not has_all:
                    _name_inside(axes, f"H{head.head}")

    return Column("\n".join(lines), wide=wide, draw=draw)


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


def _panel(layout: Layout, left: float, wide: float, label: str) -> Axes:
    """Return axes across all rows of a block, whose y is the number of the row."""
    axes = layout.board.place(left, layout.top, wide, len(layout.rows) * layout.height)
    axes.set_ylim(len(layout.rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.patch.set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(3, min_n_ticks=2))
    axes.grid(axis="x")
    axes.set_xlabel(label, fontsize=SMALLEST, labelpad=1.5)
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


def _draw_distance(layout: Layout, left: float, wide: float) -> None:
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


def _with_n(estimate: Estimate) -> str:
    """Return the number of images of an estimate, as the end of an axis label."""
    if estimate.n is None:
        return ""
    return f", n = {estimate.n:,}"


def _draw_lens(layout: Layout, left: float, wide: float, chance: float | None) -> None:
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


def _draw_lost(layout: Layout, left: float, wide: float) -> None:
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


def _roles(roles: Sequence[RoleView], side: float) -> Column:
    """Return the column of the roles of heads, as wide as the role with most exemplars."""
    most = max(len(role.exemplars) for role in roles)
    pictures = most * (side + GAP)
    title = "what one head does"
    if most:
        title = "images that one head of the\nlayer helps most, and its label"

    def draw(layout: Layout, left: float, _: float) -> None:
        _draw_roles(layout, left, pictures)

    return Column(title, wide=pictures + _WORDS, draw=draw)


def _draw_roles(layout: Layout, left: float, pictures: float) -> None:
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
            axes = layout.board.place(left + place * (side + GAP), y - side / 2, side, side)
            _draw_exemplar(axes, exemplar)
        words = fit(row.role.words, _WORDS, lines=lines - 1)
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
    all_labels = fit(f"{name} helps {' and '.join(role.helps)}", _WORDS, lines=lines)
    if any(line.endswith("…") for line in all_labels):
        return fit(f"{name} helps {role.helps[0]}", _WORDS, lines=lines)
    return all_labels


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
