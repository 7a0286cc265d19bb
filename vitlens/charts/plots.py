"""Charts with axes: intervals, lines, scatter and bars."""

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from vitlens.charts.style import GREY, SMALL, abreast, full_width, heading, in_column, sheet, shortened, styled
from vitlens.charts.values import MARKERS, STYLES, Draw, Values, colour, label, legend, numbers, series_of, value

_MOST = 30  # rows of a chart that has a line for each


def intervals(
    by: str,
    *values: str,
    of: str = "",
    reference: float | None = None,
    titles: Sequence[str] = (),
    filled: bool = False,
    words: Callable[[Any], str] | None = None,
) -> Draw:
    """Return a line for each `by`, a dot with its interval for each of the values and each series `of`; reference: a
    dashed line, in the values' own unit as drawn (% for fractions); filled: bars from 0 in the place of dots, at whose
    end stand these words."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        named, title = _first(rows, by, title)
        drawn = [(name, own, each) for name, own in series_of(rows, of).items() for each in values]
        figure = sheet(_share(0.8), 0.7 + max(0.24, 0.13 * len(drawn)) * max(len(named), 2))
        axes = figure.subplots()
        tall = (0.8 if filled else 0.6) / len(drawn)
        for at, (name, own, column) in enumerate(drawn):
            kept = [row for row in own if str(value(row, by)) in named]
            found = numbers(kept, column)
            own_title = titles[at % len(values)] if titles else ""
            places = np.array([named.index(str(value(row, by))) for row in kept]) + tall * (at + 0.5 - len(drawn) / 2)
            series = " · ".join(filter(None, (name, own_title or (label(rows, column) if len(values) > 1 else ""))))
            if filled:
                axes.barh(places, found[0], 0.9 * tall, color=colour(at), label=series)
            else:
                axes.plot(found[0], places, MARKERS[at % len(MARKERS)], color=colour(at), markersize=4, label=series)
            axes.hlines(places, found[1], found[2], color="black" if filled else colour(at), linewidth=1.0)
            for row, place, end in zip(kept, places, found[0]) if words else ():
                axes.annotate(words(row), (end, place), (3, 0), textcoords="offset points", va="center", fontsize=SMALL)  # type: ignore[misc]
        if reference is not None:
            axes.axvline(reference, color=GREY, linestyle="--", linewidth=0.9)
        axes.set_yticks(
            range(len(named)), [textwrap.fill(shortened(name, 34), 18 if in_column() else 34) for name in named]
        )
        axes.set_ylim(len(named) - 0.4, -0.6)
        axes.set_xlabel(label(rows, values[0]) if len(values) == 1 or titles else "")
        axes.grid(axis="x")
        legend(figure, axes)
        heading(figure, title)
        return figure

    return draw


def _share(of_page: float) -> float:
    """Return the width of a figure, inch: a share of a page, or a whole column."""
    return full_width() if in_column() else full_width() * of_page


def _first(rows: Sequence[Any], by: str, title: str) -> tuple[list[str], str]:
    """Return the names of the lines of a chart, and its title, which says where it shows the first of them alone."""
    every = list(dict.fromkeys(str(value(row, by)) for row in rows))
    return every[:_MOST], f"{title}, the first {_MOST} of {len(every)}" if len(every) > _MOST else title


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
) -> Draw:
    """Return a curve of each y over x for each series `of`, with its interval as a band; a panel for each value of
    `panel`; log, loglog: whether y, or both axes, are logarithmic; reference: a column whose value, chance or no
    change, is drawn dashed."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        panels = series_of(rows, panel)
        across = abreast(1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3)
        down = -(-len(panels) // across)
        figure = sheet(_share(0.75 if across == 1 else 1.0), 0.4 + (2.4 if across == 1 else 1.9) * down)
        grid = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
        names = list(series_of(rows, of))
        for axes, (name, own) in zip(grid, panels.items()):
            for at, y in enumerate(ys):
                for series, part in series_of(own, of).items():
                    words = " · ".join(filter(None, (series, label(rows, y) if len(ys) > 1 else "")))
                    _curve(axes, part, x, y, len(names) * at + names.index(series), words, band)
            if reference:
                axes.axhline(numbers(own[:1], reference)[0, 0], color=GREY, linestyle="--", linewidth=0.9)
            axes.set_title(textwrap.fill(name, 60 if across == 1 and not in_column() else 30))
            axes.set_xlabel(label(rows, x))
            whole = bool(np.all(np.mod(numbers(own, x)[0], 1) == 0))
            axes.xaxis.set_major_locator(MaxNLocator(8 if whole else 5, integer=whole, min_n_ticks=1))
            axes.grid(axis="y")
            if log:
                axes.set_yscale("log")
            if loglog:
                _log_axes(axes)
                shown = _spaced(numbers(own, x)[0])
                axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[::across]:
            axes.set_ylabel(label(rows, ys[0]) if len(ys) == 1 else "")
        legend(figure, *grid)
        heading(figure, title)
        return figure

    return draw


def _log_axes(axes: Axes) -> None:
    """Make both axes logarithmic, with plain numbers where these are short; called after everything is drawn."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if low > 1e-3 and high < 1e6:
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True)


def _spaced(values: Values) -> list[float]:
    """Return those values, in order, whose labels do not touch on a logarithmic axis."""
    shown: list[float] = []
    step = max(1.5, (values.max() / values.min()) ** 0.2)
    for each in np.unique(values).tolist():
        if not shown or each >= step * shown[-1]:
            shown.append(each)
    return shown


def _curve(axes: Axes, rows: Sequence[Any], x: str, y: str, index: int, name: str, band: bool) -> None:
    """One curve through what was measured; several rows at one x are drawn as dots, and the curve is their mean."""
    at = numbers(rows, x)[0]
    found = numbers(rows, y)
    places = np.unique(at)
    several = len(places) < len(at)
    if several:
        axes.plot(at, found[0], "o", color=colour(index), markersize=2.4, alpha=0.6, markeredgewidth=0)
        found = np.stack([[np.nanmean(found[0, at == place]), np.nan, np.nan] for place in places], 1)
    order = np.argsort(places if several else at)
    order = order[np.isfinite(found[0, order])]
    curve = (places if several else at)[order]
    axes.plot(curve, found[0, order], STYLES[index % 4], color=colour(index), marker="o", markersize=3, label=name)
    if band and not several:
        axes.fill_between(curve, found[1, order], found[2, order], color=colour(index), alpha=0.18, linewidth=0)


def scatter(x: str, y: str, *, of: str = "") -> Draw:
    """Return a point for each row with its intervals, and a dashed line of equal values."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        figure = sheet(_share(0.7), 3.2)
        axes = figure.subplots()
        for at, (series, own) in enumerate(series_of(rows, of).items()):
            across = numbers(own, x)
            up = numbers(own, y)
            errors = [np.nan_to_num(np.abs(found[0] - found[1:])) for found in (across, up)]
            axes.errorbar(
                across[0],
                up[0],
                xerr=errors[0],
                yerr=errors[1],
                fmt=MARKERS[at % len(MARKERS)],
                color=colour(at),
                markersize=4,
                elinewidth=0.8,
                label=series,
            )
        low, high = (end(axes.get_xlim() + axes.get_ylim()) for end in (min, max))
        axes.plot([low, high], [low, high], "--", color=GREY, linewidth=0.8)
        axes.set(xlabel=label(rows, x), ylabel=label(rows, y))
        axes.grid()
        legend(figure, axes)
        heading(figure, title)
        return figure

    return draw
