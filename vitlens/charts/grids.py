"""Charts of cells: boards of layers by heads, and matrices."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts.values import Draw, Values, label, numbers, unit_of, value
from vitlens.figures.board import BAR_ROOM, Margins
from vitlens.figures.board import board as panels
from vitlens.figures.gaps import no_value_patch
from vitlens.figures.overlay import Scale, colour_bar, is_constant
from vitlens.figures.signed import clipped_scale, draw_dots, name_heads, symmetric_scale
from vitlens.figures.style import COUNTS, MAGNITUDE, SIGNED, SMALL, WIDE, heading, sheet, shortened, styled
from vitlens.report.numbers import number

_PANELS: Final = 6
_LETTER: Final = 0.066  # inch per letter of a tick


def board(
    *values: str | Callable[[], Sequence[str]],
    titles: Callable[[str], str] | None = None,
    signed: bool = False,
    marked: Callable[[Any], bool] | None = None,
    ranges: Callable[[str], tuple[float, float] | None] | None = None,
    least: float = 0.0,
) -> Draw:
    """A map of layers (down) by heads (across) for each of at most six columns, each with its colour bar.

    Rows have a layer and a head. values: names of columns, or a function that gives them when the board is drawn;
    titles: of each by name; marked: the cells with a dot; ranges: of the colours, where not that of the values;
    signed: colours symmetric around 0, at least up to `least`; a few extreme values lie beyond them, as the bar shows.
    """

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        names = [name for each in values for name in ([each] if isinstance(each, str) else each())]
        known = [name for name in names if np.isfinite(numbers(rows, name)[0]).any()][:_PANELS]
        across = len(known) if len(known) < 3 else 2 if len(known) == 4 else 3
        heads = [textwrap.fill(label(rows, name, titles(name) if titles else ""), 26) for name in known]
        gap = (BAR_ROOM, 0.58 + 0.14 * max(text.count("\n") for text in heads))
        margins = Margins(left=0.45, right=BAR_ROOM, top=gap[1] - 0.36, bottom=0.6)
        wide = min((WIDE - margins.left - margins.right + gap[0]) / across - gap[0], 2.5)
        shape = 1 + max(row.layer for row in rows), 1 + max(row.head for row in rows)
        tall = float(np.clip(wide * shape[0] / shape[1], 0.9, 2.8))
        drawn = panels(title=title, count=len(known), across=across, panel=(wide, tall), gap=gap, margins=margins)
        dots = np.zeros(shape, bool)
        for row in rows if marked else ():
            dots[row.layer, row.head] = marked(row)  # type: ignore[misc]
        for index, (axes, name, head) in enumerate(zip(drawn.panels, known, heads)):
            cells = _cells(rows, numbers(rows, name)[0], shape)
            scale = clipped_scale(cells, least=least) if signed else _scale(cells, ranges(name) if ranges else None)
            colours = SIGNED if signed else MAGNITUDE
            axes.add_patch(no_value_patch(transform=axes.transAxes, zorder=-1))
            axes.imshow(cells, cmap=colours, norm=scale.norm, aspect="auto")
            axes.spines[:].set_visible(False)
            axes.set_title(head)
            name_heads(axes, shape)
            draw_dots(axes, dots) if dots.any() else None
            down, right = divmod(index, across)
            beside = drawn.left + right * (wide + gap[0]) + wide + 0.06
            bar = drawn.place(beside, drawn.top + down * (tall + gap[1]), 0.09, tall)
            unit = unit_of(rows, name)
            colour_bar(bar, scale=scale, label="%" if unit == "fraction" else unit, colours=colours, both=signed)
        return drawn.figure

    return draw


def _cells(rows: Sequence[Any], found: Values, shape: tuple[int, int]) -> Values:
    cells = np.full(shape, np.nan)
    for row, each in zip(rows, found):
        cells[row.layer, row.head] = each
    return cells


def _scale(cells: Values, limits: tuple[float, float] | None) -> Scale:
    if limits is not None:
        return Scale(*limits)
    known = cells[np.isfinite(cells)]
    low, high = float(known.min()), float(known.max())
    return Scale(low, low) if is_constant(known) else Scale(low, high)


def matrix(
    down: str,
    across: str,
    cell: str,
    *,
    signed: bool = False,
    below: Callable[[Any], str] | None = None,
    words: Callable[[Any], str] | None = None,
) -> Draw:
    """A cell for each pair of the values of two columns, with its number where there is room; below: a second line;
    words: what stands in the place of numbers, where colours are judgements, which need no bar."""

    @styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        names = [list(dict.fromkeys(str(value(row, name)) for row in rows)) for name in (down, across)]
        found, cells = numbers(rows, cell)[0], np.full((len(names[0]), len(names[1])), np.nan)
        texts: dict[tuple[int, int], str] = {}
        shares, plain = unit_of(rows, cell) == "fraction", np.abs(found).max(initial=0.0, where=~np.isnan(found)) <= 1.0
        digits = 1 if shares else 2 if plain else None  # of correlations and differences of areas
        for row, each in zip(rows, found):
            at = names[0].index(str(value(row, down))), names[1].index(str(value(row, across)))
            cells[at] = each
            text = words(row) if words else "" if np.isnan(each) else number(each, digits)
            texts[at] = "\n".join(filter(None, (text, below(row) if below and text else "")))
        wide = min(WIDE - 1.6, 0.72 * len(names[1]))
        figure = sheet(wide + 1.6, 0.9 + min(6.0, wide * len(names[0]) / len(names[1]) * 0.62 + 0.3))
        axes = figure.subplots()
        scale = symmetric_scale([cells]) if signed else _scale(cells, None)
        colours = SIGNED if signed else COUNTS
        shown = axes.imshow(cells, cmap=colours, norm=scale.norm, aspect="auto")
        if len(names[1]) <= 14 and len(names[0]) <= 24:
            for at, text in texts.items():
                light = float(scale.norm(cells[at])) if text else 0.0
                ink = "white" if (abs(light - 0.5) > 0.4 if signed else light > 0.6) else "black"
                axes.text(at[1], at[0], text, ha="center", va="center", fontsize=SMALL, color=ink)
        for axis, known, room in ((axes.xaxis, names[1], 24), (axes.yaxis, names[0], 36)):
            places = range(0, len(known), -(-len(known) // room))
            axis.set_ticks(places, labels=[shortened(known[place], 24) for place in places])
        room = int(wide / len(names[1]) / _LETTER)
        if max(len(word) for name in names[1] for word in name.split(" ")) <= room:
            axes.set_xticks(
                axes.get_xticks(), [textwrap.fill(each.get_text(), room) for each in axes.get_xticklabels()]
            )
        elif sum(map(len, names[1])) > 60 or max(map(len, names[1])) > room + 1:
            for each in axes.get_xticklabels():
                each.set(rotation=45, ha="right", rotation_mode="anchor")
        axes.set(xlabel=label(rows, across), ylabel=label(rows, down))
        axes.spines[:].set_visible(False)
        if not words:
            figure.colorbar(shown, ax=axes, label=label(rows, cell), shrink=0.8)
        heading(figure, title)
        return figure

    return draw
