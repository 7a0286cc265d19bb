"""Charts with axes: intervals, lines, scatter and bars."""

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from vitlens.charts.style import (
    GREY,
    SMALL,
    abreast,
    full_width,
    heading,
    in_column,
    sheet,
    shorten,
    styled,
)
from vitlens.charts.values import (
    MARKERS,
    Draw,
    Values,
    colour,
    column_of,
    label,
    legend,
    line_style,
    numbers,
    numbers_with_ends,
    series_of,
    value,
)

_MOST = 30  # rows of a chart that has a line for each
_LETTERS_OF_HEIGHT = 34  # of a label along the lowest panel
_LETTERS_OF_NAME = 34  # of a line's name, at most


def intervals(
    by: str,
    *values: str,
    of: str = "",
    reference: float | None = None,
    titles: Sequence[str] = (),
    filled: bool = False,
    words: Callable[[Any], str] | None = None,
) -> Draw:
    """Return a chart with a line for each `by`, which has dots with their intervals.

    A line has a dot for each value and each series `of`.

    by: the column that names the lines.
    values: the columns of the numbers.
    of: the column by which rows are divided into series, "" for one series.
    reference: a dashed line, in the unit that is drawn (% for fractions).
    titles: the titles of the values in the legend.
    filled: draws bars from 0 in place of dots.
    words: the text at the end of a row's bar.
    """

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        names, title = _lines_and_title(rows, by, title)
        value_titles = dict.fromkeys(values, "")
        if titles:
            value_titles = dict(zip(values, titles))
        elif len(values) > 1:
            value_titles = {column: label(rows, column) for column in values}
        # the dots of a line: one for each series and value
        groups = list(product(series_of(rows, of).items(), values))
        figure = sheet(_figure_width(0.8), 0.7 + max(0.24, 0.13 * len(groups)) * max(len(names), 2))
        axes = figure.subplots()
        height = (0.8 if filled else 0.6) / len(groups)
        for index, ((series, series_rows), column) in enumerate(groups):
            drawn_rows = []
            lines_of_rows = []
            for row in series_rows:
                name = str(value(row, by))
                if name in names:
                    drawn_rows.append(row)
                    lines_of_rows.append(names.index(name))
            centres, lows, highs = numbers_with_ends(drawn_rows, column)
            # the dots of a line are centred on it, one below the other
            ys = np.array(lines_of_rows) + height * (index + 0.5 - len(groups) / 2)
            group_name = _join_names(series, value_titles[column])
            interval_colour = colour(index)
            if filled:
                interval_colour = "black"
                axes.barh(ys, centres, 0.9 * height, color=colour(index), label=group_name)
            else:
                marker = MARKERS[index % len(MARKERS)]
                axes.plot(centres, ys, marker, color=colour(index), markersize=4, label=group_name)
            axes.hlines(ys, lows, highs, color=interval_colour, linewidth=1.0)
            if words:
                for row, y, end in zip(drawn_rows, ys, centres):
                    _write_beside(axes, words(row), (end, y))
        if reference is not None:
            axes.axvline(reference, color=GREY, linestyle="--", linewidth=0.9)
        letters = 18 if in_column() else _LETTERS_OF_NAME
        short_names = [textwrap.fill(shorten(name, _LETTERS_OF_NAME), letters) for name in names]
        axes.set_yticks(range(len(names)), short_names)
        if all(name.isdecimal() for name in names):
            axes.set_ylabel(column_of(rows, by).title)  # a number does not say of what it is
        axes.set_ylim(len(names) - 0.4, -0.6)
        if len(values) == 1 or titles:
            axes.set_xlabel(label(rows, values[0]))
        axes.grid(axis="x")
        legend(figure, axes)
        heading(figure, title)
        return figure

    return draw


def _join_names(*names: str) -> str:
    """Return the names of a series that are not empty, in one text."""
    return " · ".join(filter(None, names))


def _write_beside(axes: Axes, text: str, place: tuple[float, float]) -> None:
    """Write a text at the right of a point (x, y)."""
    axes.annotate(text, place, (3, 0), textcoords="offset points", va="center", fontsize=SMALL)


def _figure_width(of_page: float) -> float:
    """Return the width of a figure, inch: a share of a page, or a whole column."""
    if in_column():
        return full_width()
    return full_width() * of_page


def _lines_and_title(rows: Sequence[Any], by: str, title: str) -> tuple[list[str], str]:
    """Return the names of the lines of a chart, and its title.

    The title says if only the first lines are drawn.
    """
    names = list(dict.fromkeys(str(value(row, by)) for row in rows))
    if len(names) > _MOST:
        title = f"{title}, the first {_MOST} of {len(names)}"
    return names[:_MOST], title


bars = partial(intervals, filled=True)


def lines(
    x: str,
    *ys: str,
    of: str = "",
    panel: str = "",
    log: bool = False,
    loglog: bool = False,
    band: bool = True,
    reference: str = "",
    y_title: str = "",
) -> Draw:
    """Return a chart with a curve of each y over x for each series `of`, its interval as a band.

    x, ys: the columns of the numbers.
    of: the column by which rows are divided into series, "" for one series.
    panel: a column, with a panel for each of its values.
    log: a logarithmic y axis.
    loglog: two logarithmic axes.
    reference: a column whose values, as of chance or no change, are drawn dashed.
    y_title: the label of the y axis, "" for the title of the column if there is only one y.
    """

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        panels = series_of(rows, panel)
        across = abreast(_columns(len(panels)))
        down = ceil(len(panels) / across)
        width = _figure_width(1.0)
        height = 1.9
        if across == 1:
            width = _figure_width(0.75)
            height = 2.4
        figure = sheet(width, 0.4 + height * down)
        grid = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
        all_series = list(series_of(rows, of))
        for axes, (name, panel_rows) in zip(grid, panels.items()):
            for y_index, y in enumerate(ys):
                name_of_y = label(rows, y) if len(ys) > 1 else ""
                for series, series_rows in series_of(panel_rows, of).items():
                    # in all panels, a series has the same colour
                    index = len(all_series) * y_index + all_series.index(series)
                    curve_name = _join_names(series, name_of_y)
                    _curve(axes, series_rows, x, y, index=index, name=curve_name, band=band)
            if reference:
                for series_rows in series_of(panel_rows, of).values():
                    _draw_reference(axes, series_rows, x, reference)
            is_wide = across == 1 and not in_column()
            axes.set_title(textwrap.fill(name, 60 if is_wide else 30))
            axes.set_xlabel(label(rows, x))
            xs = numbers(panel_rows, x)
            is_whole = bool(np.all(np.mod(xs, 1) == 0))
            axes.xaxis.set_major_locator(
                MaxNLocator(8 if is_whole else 5, integer=is_whole, min_n_ticks=1)
            )
            axes.grid(axis="y")
            if loglog:
                _log_x_axis(axes, xs)
        if log or loglog:
            for axes in grid[: len(panels)]:
                _log_y_axis(axes)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        y_label = y_title
        if len(ys) == 1 and not y_title:
            y_label = label(rows, ys[0])
        for axes in grid[::across]:
            axes.set_ylabel(textwrap.fill(y_label, _LETTERS_OF_HEIGHT))
        legend(figure, *grid)
        heading(figure, title)
        return figure

    return draw


def _columns(panels: int) -> int:
    """Return how many panels lie in a row of a page."""
    if panels == 1:
        return 1
    return 2 if panels in (2, 4) else 3  # four in two rows of two


def _draw_reference(axes: Axes, rows: Sequence[Any], x: str, reference: str) -> None:
    """Draw the values of a reference dashed: a level, or a line if they depend on x."""
    levels = numbers(rows, reference)
    if np.all(levels == levels[0]):
        axes.axhline(levels[0], color=GREY, linestyle="--", linewidth=0.9)
        return
    # several rows at one x have the same value
    xs, first_rows = np.unique(numbers(rows, x), return_index=True)
    axes.plot(xs, levels[first_rows], color=GREY, linestyle="--", linewidth=0.9)


def _log_x_axis(axes: Axes, xs: Values) -> None:
    """Make the x axis logarithmic, with ticks at values of x."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    ticks = _spaced_values(xs)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(visible=True)


def _log_y_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers where these are short.

    Called after everything is drawn, also in other panels with the same axis.
    """
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high / low < 10:
        # powers of ten and their multiples are too few in so short a range
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    elif high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if low > 1e-3 and high < 1e6:
        axes.yaxis.set_major_formatter("{x:g}")


def _spaced_values(values: Values) -> list[float]:
    """Return the values, in order, whose labels do not touch on a logarithmic axis."""
    ticks: list[float] = []
    # the least ratio of two ticks: at most six ticks fit into the range
    step = max(1.5, (values.max() / values.min()) ** 0.2)
    for candidate in np.unique(values).tolist():
        if not ticks or candidate >= step * ticks[-1]:
            ticks.append(candidate)
    return ticks


def _curve(
    axes: Axes, rows: Sequence[Any], x: str, y: str, *, index: int, name: str, band: bool
) -> None:
    """Draw one curve; several rows at one x are drawn as dots, and the curve is their mean.

    index: the number of the curve, which decides its colour and line.
    """
    xs = numbers(rows, x)
    values, lows, highs = numbers_with_ends(rows, y)
    places = np.unique(xs)
    has_repeats = len(places) < len(xs)
    if has_repeats:
        axes.plot(
            xs, values, "o", color=colour(index), markersize=2.4, alpha=0.6, markeredgewidth=0
        )
        values = np.array([np.nanmean(values[xs == place]) for place in places])
        xs = places
    order = np.argsort(xs)
    order = order[np.isfinite(values[order])]
    line = line_style(index)
    axes.plot(
        xs[order], values[order], line, color=colour(index), marker="o", markersize=3, label=name
    )
    if band and not has_repeats:
        axes.fill_between(
            xs[order], lows[order], highs[order], color=colour(index), alpha=0.18, linewidth=0
        )


def scatter(x: str, y: str, *, of: str = "") -> Draw:
    """Return a chart with a point for each row, with its intervals, and a dashed line of x = y."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        figure = sheet(_figure_width(0.7), 3.2)
        axes = figure.subplots()
        for index, (series, series_rows) in enumerate(series_of(rows, of).items()):
            x_values, *x_ends = numbers_with_ends(series_rows, x)
            y_values, *y_ends = numbers_with_ends(series_rows, y)
            axes.errorbar(
                x_values,
                y_values,
                xerr=np.nan_to_num(np.abs(x_values - np.array(x_ends))),
                yerr=np.nan_to_num(np.abs(y_values - np.array(y_ends))),
                fmt=MARKERS[index % len(MARKERS)],
                color=colour(index),
                markersize=4,
                elinewidth=0.8,
                label=series,
            )
        limits = (*axes.get_xlim(), *axes.get_ylim())
        ends = [min(limits), max(limits)]
        axes.plot(ends, ends, "--", color=GREY, linewidth=0.8)
        axes.set(xlabel=label(rows, x), ylabel=label(rows, y))
        axes.grid()
        legend(figure, axes)
        heading(figure, title)
        return figure

    return draw
