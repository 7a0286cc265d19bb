"""Charts of cells: boards of layers by heads, and matrices."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from vitlens.charts.overlay import Scale, clipped_scale, colour_bar, is_constant, no_value, symmetric_scale
from vitlens.charts.panels import BAR_ROOM, Margins, name_heads, size_of
from vitlens.charts.panels import board as panels
from vitlens.charts.style import (
    COUNTS,
    MAGNITUDE,
    SIGNED,
    SMALL,
    TALL,
    abreast,
    full_width,
    heading,
    sheet,
    shortened,
    styled,
)
from vitlens.charts.values import Draw, Values, label, numbers, series_of, unit_of, value
from vitlens.report.numbers import number

_PANELS: Final = 6
_LETTER: Final = 0.066  # inch per letter of a tick
_CELL: Final = 0.32  # inch of a cell in which a number has room


def board(
    *values: str | Callable[[], Sequence[str]],
    titles: Callable[[str], str] | None = None,
    signed: bool = False,
    marked: Callable[[Any], bool] | None = None,
    ranges: Callable[[str], tuple[float, float] | None] | None = None,
    least: float = 0.0,
) -> Draw:
    """Return a map of layers (down) by heads (across) for each of at most six columns, each with its colour bar.

    Rows have a layer and a head. values: names of columns, or a function that gives them when the board is drawn;
    titles: of each by name; marked: the cells with a dot; ranges: of the colours, where not that of the values;
    signed: colours symmetric around 0, at least up to `least`; a few extreme values lie beyond them, as the bar shows.
    """

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        names = [name for each in values for name in ([each] if isinstance(each, str) else each())]
        known = [name for name in names if np.isfinite(numbers(rows, name)[0]).any()][:_PANELS]
        across = abreast(len(known) if len(known) < 3 else 2 if len(known) == 4 else 3)
        heads = [textwrap.fill(label(rows, name, titles(name) if titles else ""), 26) for name in known]
        gap = (BAR_ROOM, 0.58 + 0.14 * max(text.count("\n") for text in heads))
        margins = Margins(left=0.45, right=BAR_ROOM, top=gap[1] - 0.36, bottom=0.6)
        wide = min((full_width() - margins.left - margins.right + gap[0]) / across - gap[0], 2.5)
        shape = 1 + max(row.layer for row in rows), 1 + max(row.head for row in rows)
        most = min(2.8, (TALL - 1.0) / -(-len(known) // across) - gap[1])
        tall = float(np.clip(wide * shape[0] / shape[1], min(0.9, most), most))
        drawn = panels(title=title, count=len(known), across=across, panel=(wide, tall), gap=gap, margins=margins)
        dots = np.zeros(shape, bool)
        for row in rows if marked else ():
            dots[row.layer, row.head] = marked(row)  # type: ignore[misc]
        for index, (axes, name, head) in enumerate(zip(drawn.panels, known, heads)):
            cells = _cells(rows, numbers(rows, name)[0], shape)
            scale = clipped_scale(cells, least=least) if signed else _scale(cells, ranges(name) if ranges else None)
            colours = SIGNED if signed else MAGNITUDE
            no_value(axes)
            axes.imshow(cells, cmap=colours, norm=scale.norm, aspect="auto")
            axes.spines[:].set_visible(False)
            axes.set_title(head)
            name_heads(axes, shape)
            _draw_dots(axes, dots)
            down, right = divmod(index, across)
            beside = drawn.left + right * (wide + gap[0]) + wide + 0.06
            bar = drawn.place(beside, drawn.top + down * (tall + gap[1]), 0.09, tall)
            unit = unit_of(rows, name)
            colour_bar(bar, scale=scale, label="%" if unit == "fraction" else unit, colours=colours, both=signed)
        return drawn.figure

    return draw


def _draw_dots(axes: Axes, marks: NDArray[np.bool_]) -> None:
    """A dot in each marked cell (rows, columns), as large as the cells allow."""
    wide, tall = size_of(axes)
    size = float(np.clip(22 * min(tall / marks.shape[0], wide / marks.shape[1]), 1.5, 4.0))
    down, across = np.nonzero(marks)
    axes.plot(across, down, "o", color="black", markersize=size, markeredgecolor="white", markeredgewidth=0.4)


def _cells(rows: Sequence[Any], found: Values, shape: tuple[int, int]) -> Values:
    cells = np.full(shape, np.nan)
    for row, each in zip(rows, found):
        cells[row.layer, row.head] = each
    return cells


def _scale(cells: Values, limits: tuple[float, float] | None) -> Scale:
    if limits is not None:
        return Scale(*limits)
    known = cells[np.isfinite(cells)]
    low = float(known.min())
    high = float(known.max())
    return Scale(low, low) if is_constant(known) else Scale(low, high)


def matrix(
    down: str,
    across: str,
    cell: str,
    *,
    signed: bool = False,
    below: Callable[[Any], str] | None = None,
    panel: str = "",
    words: Callable[[Any], str] | None = None,
) -> Draw:
    """Return a cell for each pair of the values of two columns, with its number where there is room; below: a second
    line; panel: a column, with a matrix for each of its values, at most three in a row, all on one scale; words: what
    stands in the place of numbers, where colours are judgements, which need no bar."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        parts = series_of(rows, panel)
        shapes = [[len({str(value(row, name)) for row in own}) for name in (down, across)] for own in parts.values()]
        tallest, widest = (max(sides) for sides in zip(*shapes))
        columns = abreast(min(len(parts), 3))
        lines = -(-len(parts) // columns)
        wide = min((full_width() - 1.6) / columns, 0.72 * widest)
        tall = min(6.0, wide * tallest / widest * (0.62 if columns == 1 else 1.0) + 0.3)
        figure = sheet(min(full_width(), wide * columns + 1.6), 0.2 + lines * (tall + (0.7 if columns == 1 else 0.9)))
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        every = numbers(rows, cell)[0]
        within = unit_of(rows, cell) != "fraction" and np.abs(every).max(initial=0.0, where=~np.isnan(every)) <= 1.0
        digits = 1 if unit_of(rows, cell) == "fraction" else 2 if within else None  # 2: correlations, areas
        scale = symmetric_scale(every) if signed else _scale(every, None)
        has_room = columns == 1 and wide / widest >= _CELL
        for axes, (name, own) in zip(grid, parts.items()):
            found = numbers(own, cell)[0]
            texts = [
                words(row) if words else "" if np.isnan(each) else number(each, digits) for row, each in zip(own, found)
            ]
            if below:
                texts = [f"{text}\n{below(row)}" if text else "" for text, row in zip(texts, own)]
            shown = _fill(axes, own, (down, across), found, texts if has_room else [], scale, signed=signed)
            _name_columns(axes, int(wide / len(axes.get_xticks()) / _LETTER))
            axes.set_title(textwrap.fill(name, 60 if columns == 1 else int(wide / 0.075)))
        for axes in grid[len(parts) :]:
            axes.set_visible(False)
        if not words:
            figure.colorbar(shown, ax=grid, label=label(rows, cell), shrink=0.8)
        heading(figure, title)
        return figure

    return draw


def _name_columns(axes: Axes, room: int) -> None:
    """Names of columns on several lines where their words fit into so many letters, else at a slant."""
    ticks = axes.get_xticklabels()
    names = [tick.get_text() for tick in ticks]
    if max(len(word) for name in names for word in name.split(" ")) <= room:
        axes.set_xticks(axes.get_xticks(), [textwrap.fill(name, room) for name in names])
    elif max(map(len, names)) > room + 1:
        for tick in ticks:
            tick.set(rotation=45, ha="right", rotation_mode="anchor")


def _fill(
    axes: Axes,
    rows: Sequence[Any],
    sides: tuple[str, str],
    found: Values,
    words: Sequence[str],
    scale: Scale,
    *,
    signed: bool,
) -> AxesImage:
    """Return one matrix; words: of its cells, in the order of the rows."""
    names = [list(dict.fromkeys(str(value(row, name)) for row in rows)) for name in sides]
    places = [tuple(known.index(str(value(row, side))) for known, side in zip(names, sides)) for row in rows]
    cells = np.full((len(names[0]), len(names[1])), np.nan)
    for at, each in zip(places, found):
        cells[at] = each
    shown = axes.imshow(cells, cmap=SIGNED if signed else COUNTS, norm=scale.norm, aspect="auto")
    if len(names[1]) <= 14 and len(names[0]) <= 24:
        for at, text in zip(places, words):
            light = float(scale.norm(cells[at])) if text else 0.0
            ink = "white" if (abs(light - 0.5) > 0.4 if signed else light > 0.6) else "black"
            axes.text(at[1], at[0], text, ha="center", va="center", fontsize=SMALL, color=ink)
    for axis, known, room in ((axes.xaxis, names[1], 24), (axes.yaxis, names[0], 36)):
        ticks = range(0, len(known), -(-len(known) // room))
        axis.set_ticks(ticks, labels=[shortened(known[tick], 24) for tick in ticks])
    axes.set(xlabel=label(rows, sides[1]), ylabel=label(rows, sides[0]))
    axes.spines[:].set_visible(False)
    return shown
