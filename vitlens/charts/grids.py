"""Charts of cells: boards of layers by heads, and matrices."""

import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from vitlens.charts.overlay import (
    Scale,
    clipped_scale,
    colour_bar,
    is_constant,
    no_value,
    symmetric_scale,
)
from vitlens.charts.panels import BAR_ROOM, Margins, name_heads, size_of
from vitlens.charts.panels import board as board_of_panels
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
    shorten,
    styled,
)
from vitlens.charts.values import Draw, Values, label, numbers, series_of, unit_of, value
from vitlens.report.numbers import number

# of a board
_MOST_WIDE: Final = 2.5  # inch of a panel
_MOST_TALL: Final = 2.8  # inch of a panel
_LEAST_TALL: Final = 0.9  # inch of a panel, if a page has room for it
_BETWEEN: Final = 0.58  # inch between two rows of panels, for axis labels and a title of one line
_AXIS_LABELS: Final = 0.36  # inch of _BETWEEN for axis labels, which are not above the first row
_LINE: Final = 0.14  # inch of each further line of a title
_TITLE_LETTERS: Final = 26  # of a line of a panel's title
# of a matrix
_LABEL_ROOM: Final = 0.35  # inch for the label of the lines and its distance from their names
_LINE_LETTERS: Final = 24  # of the name of a line
_BAR: Final = 0.75  # inch for the colour bar
_GAP: Final = 0.1  # inch between two panels
_LEAST_PANEL: Final = 0.9  # inch of a panel next to others
_LEAST_WIDE: Final = 0.5  # inch of the only panel of a row
_MOST_CELL: Final = 0.72  # inch of the width of a cell
_LETTER: Final = 0.066  # inch per letter of a tick
_BLANK: Final = 0.04  # inch between two ticks, at least
_TITLE_LETTER: Final = 0.075  # inch per letter of a title
_CELL: Final = 0.32  # inch of a cell in which a number has room


def board(
    *values: str | Callable[[], Sequence[str]],
    titles: Callable[[str], str] | None = None,
    signed: bool = False,
    marked: Callable[[Any], bool] | None = None,
    ranges: Callable[[str], tuple[float, float] | None] | None = None,
    least: float = 0.0,
) -> Draw:
    """Return a chart with a map of layers (down) by heads (across) for each column of numbers.

    Rows have a layer and a head. Each map has its colour bar.

    values: names of columns, or a function that returns names when the board is drawn.
    titles: returns the title of a column by its name (None: as the column declares it).
    signed: True for colours symmetric around 0. A few extreme values lie beyond them, as the bar
        shows.
    marked: returns True for a row whose cell has a dot.
    ranges: returns the range of the colours of a column by its name, or None for that of its
        values.
    least: the value up to which signed colours reach at least.
    """

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        names = _numeric_columns(rows, values)
        panel_titles = []
        for name in names:
            chosen_title = titles(name) if titles else ""
            panel_titles.append(textwrap.fill(label(rows, name, chosen_title), _TITLE_LETTERS))
        layers = 1 + max(row.layer for row in rows)
        heads = 1 + max(row.head for row in rows)
        panels_across = abreast(_columns(len(names)))
        panels_down = ceil(len(names) / panels_across)
        gap_right = BAR_ROOM
        gap_down = _BETWEEN + _LINE * max(text.count("\n") for text in panel_titles)
        margins = Margins(left=0.45, right=BAR_ROOM, top=gap_down - _AXIS_LABELS, bottom=0.6)
        room = full_width() - margins.left - margins.right
        wide = min((room + gap_right) / panels_across - gap_right, _MOST_WIDE)
        page_height = TALL - 1.0  # without title and margins
        most_tall = min(_MOST_TALL, page_height / panels_down - gap_down)
        square_cells = wide * layers / heads
        tall = float(np.clip(square_cells, min(_LEAST_TALL, most_tall), most_tall))
        drawn = board_of_panels(
            title=title,
            count=len(names),
            across=panels_across,
            panel=(wide, tall),
            gap=(gap_right, gap_down),
            margins=margins,
        )
        dots = np.zeros((layers, heads), bool)
        if marked:
            for row in rows:
                dots[row.layer, row.head] = marked(row)
        for index, (axes, name, panel_title) in enumerate(zip(drawn.panels, names, panel_titles)):
            cells = _cells(rows, numbers(rows, name), (layers, heads))
            if signed:
                colours = SIGNED
                scale = clipped_scale(cells, least=least)
            else:
                colours = MAGNITUDE
                scale = _scale(cells, ranges(name) if ranges else None)
            no_value(axes)
            axes.imshow(cells, cmap=colours, norm=scale.norm, aspect="auto")
            axes.spines[:].set_visible(False)
            axes.set_title(panel_title)
            name_heads(axes, (layers, heads))
            _draw_dots(axes, dots)
            panel_row, panel_column = divmod(index, panels_across)
            x = drawn.left + panel_column * (wide + gap_right) + wide + 0.06
            y = drawn.top + panel_row * (tall + gap_down)
            bar = drawn.place(x, y, width=0.09, height=tall)
            unit = unit_of(rows, name)
            if unit == "fraction":
                unit = "%"
            colour_bar(bar, scale=scale, label=unit, colours=colours, both=signed)
        return drawn.figure

    return draw


def _numeric_columns(
    rows: Sequence[Any], values: Sequence[str | Callable[[], Sequence[str]]]
) -> list[str]:
    """Return the names of the columns that hold at least one finite number."""
    names: list[str] = []
    for entry in values:
        if isinstance(entry, str):
            names.append(entry)
        else:
            names += entry()
    return [name for name in names if np.isfinite(numbers(rows, name)).any()]


def _columns(count: int) -> int:
    """Return how many of these panels lie in a row of a page."""
    if count < 3:
        return count
    return 2 if count == 4 else 3


def _draw_dots(axes: Axes, marks: NDArray[np.bool_]) -> None:
    """Draw a dot in each marked cell (rows, columns), as large as the cells allow."""
    wide, tall = size_of(axes)
    size = float(np.clip(22 * min(tall / marks.shape[0], wide / marks.shape[1]), 1.5, 4.0))
    down, across = np.nonzero(marks)
    axes.plot(
        across,
        down,
        "o",
        color="black",
        markersize=size,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def _cells(rows: Sequence[Any], values: Values, shape: tuple[int, int]) -> Values:
    """Return the values of the rows by layer and head; NaN for a cell without a row."""
    cells = np.full(shape, np.nan)
    for row, cell in zip(rows, values):
        cells[row.layer, row.head] = cell
    return cells


def _scale(cells: Values, limits: tuple[float, float] | None = None) -> Scale:
    """Return the scale of the range of the values, or of these limits."""
    if limits is not None:
        return Scale(*limits)
    finite = cells[np.isfinite(cells)]
    low = float(finite.min())
    if is_constant(finite):
        return Scale(low, low)
    return Scale(low, float(finite.max()))


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
    """Return a chart with a cell for each pair of the values of two columns.

    A cell has its number if there is room.

    down, across: the columns whose values name the lines and the columns of the matrix.
    cell: the column of the numbers.
    signed: True for colours symmetric around 0.
    below: a second line in each cell.
    panel: a column, with a matrix for each of its values, at most three in a row, all on one scale.
    words: the texts in place of numbers, for colours that are judgements and need no bar.
    """

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        rows_by_panel = series_of(rows, panel)
        most_lines = max(len(series_of(part, down)) for part in rows_by_panel.values())
        most_columns = max(len(series_of(part, across)) for part in rows_by_panel.values())
        names_of_lines = [tuple(series_of(part, down)) for part in rows_by_panel.values()]
        # panels of the same lines name them once in each row of panels
        names_once = len(set(names_of_lines)) == 1
        longest_name = max(len(name) for names in names_of_lines for name in names)
        names_width = _LABEL_ROOM + _LETTER * min(longest_name, _LINE_LETTERS)
        panels_across = abreast(min(len(rows_by_panel), 3))
        while panels_across > 1:
            cells_width = _room_of_panels(panels_across, names_width, names_once=names_once)
            if cells_width / panels_across >= _LEAST_PANEL:
                break
            panels_across -= 1
        panels_down = ceil(len(rows_by_panel) / panels_across)
        cells_width = _room_of_panels(panels_across, names_width, names_once=names_once)
        panel_width = max(min(cells_width / panels_across, _MOST_CELL * most_columns), _LEAST_WIDE)
        rest_width = full_width() - cells_width
        flatness = 1.0
        names_height = 0.9
        if panels_across == 1:  # wide cells, which have room for numbers
            flatness = 0.62
            names_height = 0.7
        cells_height = min(6.0, panel_width * most_lines / most_columns * flatness + 0.3)
        panel_height = cells_height + names_height
        figure = sheet(
            min(full_width(), panel_width * panels_across + rest_width),
            0.2 + panels_down * panel_height,
        )
        grid = list(figure.subplots(panels_down, panels_across, squeeze=False).flat)
        values = numbers(rows, cell)
        digits = _digits(values, unit_of(rows, cell))
        scale = symmetric_scale(values) if signed else _scale(values)
        has_room = panels_across == 1 and panel_width / most_columns >= _CELL
        for index, (axes, (name, part)) in enumerate(zip(grid, rows_by_panel.items())):
            part_values = numbers(part, cell)
            texts: list[str] = []
            if has_room:
                texts = _cell_texts(part, part_values, digits, words, below)
            image = _draw_matrix(
                axes, part, (down, across), part_values, texts, scale, signed=signed
            )
            if names_once and index % panels_across:
                axes.tick_params(labelleft=False)
                axes.set_ylabel("")
            room_of_tick = panel_width / len(axes.get_xticks())
            _break_names(axes, letters=int(room_of_tick / _LETTER))
            letters_of_title = 60 if panels_across == 1 else int(panel_width / _TITLE_LETTER)
            axes.set_title(textwrap.fill(name, letters_of_title))
        for axes in grid[len(rows_by_panel) :]:
            axes.set_visible(False)
        if not words:
            # all panels have the same scale, so any of their images gives the bar
            figure.colorbar(image, ax=grid, label=label(rows, cell), shrink=0.8)
        heading(figure, title)
        _slant_touching_names(figure, grid[: len(rows_by_panel)])
        return figure

    return draw


def _room_of_panels(panels_across: int, room_of_lines: float, *, names_once: bool) -> float:
    """Return the width that is left for the cells of all panels of a row, inch."""
    columns_of_names = 1 if names_once else panels_across
    return full_width() - columns_of_names * room_of_lines - _BAR - _GAP * (panels_across - 1)


def _digits(values: Values, unit: str) -> int | None:
    """Return the decimals of the numbers in cells; None for three significant digits."""
    if unit == "fraction":
        return 1
    # such as correlations and areas
    is_within_one = np.abs(values).max(initial=0.0, where=~np.isnan(values)) <= 1.0
    return 2 if is_within_one else None


def _cell_texts(
    rows: Sequence[Any],
    values: Values,
    digits: int | None,
    words: Callable[[Any], str] | None,
    below: Callable[[Any], str] | None,
) -> list[str]:
    """Return the text of each row's cell, "" without a number."""
    texts = []
    for row, cell in zip(rows, values):
        if words:
            text = words(row)
        elif np.isnan(cell):
            text = ""
        else:
            text = number(cell, digits)
        if below and text:
            text += f"\n{below(row)}"
        texts.append(text)
    return texts


def _break_names(axes: Axes, *, letters: int) -> None:
    """Break the names of columns into lines of at most `letters` letters, if each word fits."""
    names = [tick.get_text() for tick in axes.get_xticklabels()]
    longest_word = max(map(len, " ".join(names).split(" ")))
    if longest_word <= letters:
        axes.set_xticks(axes.get_xticks(), [textwrap.fill(name, letters) for name in names])


def _slant_touching_names(figure: Figure, panels: Sequence[Axes]) -> None:
    """Slant the names of the columns of all panels if those of any panel touch.

    How wide a panel is, and so how much room they have, depends on all texts of the figure.
    """
    for axes in panels:
        axes.tick_params(labelsize=SMALL)  # as they are drawn
    figure.draw_without_rendering()
    least_gap = figure.dpi * _BLANK
    if not any(_names_touch(axes, least_gap) for axes in panels):
        return
    for axes in panels:
        names = [tick.get_text().replace("\n", " ") for tick in axes.get_xticklabels()]
        axes.set_xticks(axes.get_xticks(), names, rotation=45, ha="right", rotation_mode="anchor")


def _names_touch(axes: Axes, least_gap: float) -> bool:
    """Return True if two neighbouring names along the x axis are closer than a gap in px."""
    boxes = [tick.get_window_extent() for tick in axes.get_xticklabels() if tick.get_text()]
    return any(after.x0 - before.x1 < least_gap for before, after in pairwise(boxes))


def _draw_matrix(
    axes: Axes,
    rows: Sequence[Any],
    sides: tuple[str, str],
    values: Values,
    texts: Sequence[str],
    scale: Scale,
    *,
    signed: bool,
) -> AxesImage:
    """Draw one matrix.

    sides: the columns whose values name its lines and its columns.
    values, texts: the number and the text of each row's cell.
    """
    down, across = sides
    lines = list(series_of(rows, down))
    columns = list(series_of(rows, across))
    places = []
    cells = np.full((len(lines), len(columns)), np.nan)
    for row, cell in zip(rows, values):
        line = lines.index(str(value(row, down)))
        column = columns.index(str(value(row, across)))
        cells[line, column] = cell
        places.append((line, column))
    image = axes.imshow(cells, cmap=SIGNED if signed else COUNTS, norm=scale.norm, aspect="auto")
    has_readable_cells = len(columns) <= 14 and len(lines) <= 24
    if has_readable_cells:
        for (line, column), text in zip(places, texts):
            share = float(scale.norm(cells[line, column])) if text else 0.0
            ink = _ink(share, signed=signed)
            axes.text(column, line, text, ha="center", va="center", fontsize=SMALL, color=ink)
    _name_ticks(axes.xaxis, columns, most=24)
    _name_ticks(axes.yaxis, lines, most=36)
    axes.set(xlabel=label(rows, across), ylabel=label(rows, down))
    axes.spines[:].set_visible(False)
    return image


def _ink(share: float, *, signed: bool) -> str:
    """Return the colour of a text on a cell with this share of the range of colours."""
    is_dark = share > 0.6
    if signed:  # both ends of the colours are dark
        is_dark = abs(share - 0.5) > 0.4
    return "white" if is_dark else "black"


def _name_ticks(axis: Axis, names: Sequence[str], *, most: int) -> None:
    """Write at most `most` of the names along an axis."""
    ticks = range(0, len(names), ceil(len(names) / most))
    axis.set_ticks(ticks, labels=[shorten(names[tick], _LINE_LETTERS) for tick in ticks])
