"""Explanation methods compared: the result of each in every check, and its deletion and insertion curves."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.style import (
    BLUE,
    GREY,
    SERIES,
    SMALL,
    VERMILLION,
    WIDE,
    heading,
    round_ticks,
    sheet,
    shortened,
    styled,
    tick_words,
)

_ROW: Final = 0.165  # inch per method, so that twenty fit on half a page
_LONGEST: Final = 22  # letters of a method's name
_LINE_STYLES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
_ACROSS: Final = 8  # panels side by side
_LETTER: Final = 0.066  # inch per letter of a title
_ARROWS: Final = {"more": "↑", "less": "↓"}


@dataclass(frozen=True)
class Column:
    """One check: value, low, high (methods,), NaN where a method has none; title: with its unit; better: "more" or
    "less"; chance: the expected value of a random map, drawn dashed, None where there is no single one."""

    title: str
    value: ArrayLike
    low: ArrayLike
    high: ArrayLike
    better: str = "more"
    chance: float | None = None


@styled
def league_figure(
    *,
    methods: Sequence[str],
    columns: Sequence[Column],
    baselines: Sequence[str] = (),
    flagged: Sequence[str] = (),
    title: str,
) -> Figure:
    """Every method (down) in every check (across): a dot with its 95 % interval.

    methods: in this order, with the baselines, which are drawn in grey; flagged: methods that failed the
    randomisation check, in red. Raises InputError when lengths differ or there is nothing to show.
    """  # fmt: skip
    if not methods or not columns:
        raise InputError("expected at least one method and one check, found none")
    checked = [_numbers(column, len(methods)) for column in columns]
    lines = -(-len(columns) // _ACROSS)
    across = -(-len(columns) // lines)
    room = (WIDE - 0.3 - _LETTER * max(len(shortened(name, _LONGEST)) for name in methods)) / across - 0.08
    titles = [_title(column, max(6, int(room / _LETTER))) for column in columns]
    head = 0.12 * max(title.count("\n") + 1 for title in titles)
    figure = sheet(WIDE, lines * (0.45 + head + _ROW * len(methods)))
    grid = figure.subplots(lines, across, sharey=True, squeeze=False)
    places = np.arange(len(methods), dtype=np.float64)[::-1]
    for axes, column, title_of, numbers in zip(grid.flat, columns, titles, checked):
        _draw(axes, places, numbers, [_colour(name, baselines, flagged) for name in methods], column)
        axes.set_title(title_of, fontsize=SMALL)
    for axes in list(grid.flat)[len(columns) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_yticks(places, [shortened(name, _LONGEST) for name in methods])
        row[0].set_ylim(-0.6, len(methods) - 0.4)
    _legend(figure, baselines, flagged)
    heading(figure, f"{title}; ↑\u00a0more, ↓\u00a0less\u00a0is\u00a0better")
    return figure


@styled
def fidelity_curves(
    *,
    shares: ArrayLike,
    inserted: ArrayLike | None = None,
    deletion: Mapping[str, ArrayLike],
    insertion: Mapping[str, ArrayLike],
    baselines: Sequence[str] = (),
    substrate: str,
    title: str,
) -> Figure:
    """Mean probability of the target (%) as patches are removed, and as they are inserted, most relevant first.

    shares: (points,) of the patches removed, fractions from 0; inserted: of those inserted (None: the same);
    deletion, insertion: by method, (points,) fractions; baselines are drawn in grey. substrate: what replaces a
    removed patch. Raises InputError when the methods of the two differ or lengths do.
    """
    if deletion.keys() != insertion.keys() or not deletion:
        raise InputError(f"expected the same methods twice, found {list(deletion)} and {list(insertion)}")
    removed = as_array(shares, name="shares", axes=("points",))
    inserted_shares = removed if inserted is None else as_array(inserted, name="inserted", axes=("points",))
    figure = sheet(WIDE, 3.0)
    panels = figure.subplots(1, 2, sharey=True)
    handles: list[Line2D] = []
    kinds = ((deletion, removed, "removed"), (insertion, inserted_shares, "inserted"))
    for axes, (curves, steps, verb) in zip(panels, kinds):
        handles = []
        own = [name for name in curves if name not in baselines]
        for name, values in curves.items():
            line = 100 * as_array(values, name=f"{verb} {name!r}", axes=("points",))
            require_length(len(line), len(steps), name=f"points of {name!r}", of="the shares")
            handles += axes.plot(100 * steps, line, **_line(name, own, baselines))
        axes.set(xlim=(0, 100), xlabel=f"patches {verb}, most relevant first (%)")
        axes.grid(axis="y")
        axes.set_title("deletion: lower is better" if verb == "removed" else "insertion: higher is better")
    panels[0].set_ylim(0, None)  # of both panels; after drawing, as it fixes the range
    panels[0].set_ylabel("probability of the target (%)")
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(handles) // 4))
    heading(figure, f"{title}; removed patches are replaced by: {substrate}")
    return figure


def _numbers(column: Column, methods: int) -> Array:
    """Rows value, low, high; NaN is allowed."""
    rows = []
    for name in ("value", "low", "high"):
        array = np.asarray(getattr(column, name), dtype=np.float64)
        if array.shape != (methods,):
            raise InputError(f"expected {name} of {column.title!r} for {methods} methods, found shape {array.shape}")
        rows.append(array)
    return np.stack(rows)


def _colour(name: str, baselines: Sequence[str], flagged: Sequence[str]) -> str:
    return VERMILLION if name in flagged else GREY if name in baselines else BLUE


def _draw(axes: Axes, places: Array, numbers: Array, colours: Sequence[str], column: Column) -> None:
    for place, (value, low, high), colour in zip(places, numbers.T, colours):
        if np.isnan(value):
            continue
        if not np.isnan(low):
            axes.plot([low, high], [place, place], color=colour, linewidth=1.2, solid_capstyle="butt")
        axes.plot(value, place, "o" if colour != GREY else "D", color=colour, markersize=3.6)
    if column.chance is not None:
        axes.axvline(column.chance, color="black", linestyle=(0, (4, 3)), linewidth=0.7)
    axes.grid()
    axes.margins(x=0.08)
    ticks = round_ticks(*axes.get_xlim(), most=3)
    if max(map(len, tick_words(ticks))) > 3:  # no room for three
        ticks = ticks[::2]
    axes.set_xticks(ticks, tick_words(ticks))
    axes.tick_params(axis="y", length=0)


def _title(column: Column, letters: int) -> str:
    """The title of a check above its panel, with an arrow in the direction that is better."""
    return "\n".join(textwrap.wrap(f"{column.title}\u00a0{_ARROWS[column.better]}", letters, break_long_words=False))


def _legend(figure: Figure, baselines: Sequence[str], flagged: Sequence[str]) -> None:
    """Add a legend of the colours below the panels."""
    kinds = [("method", BLUE, "o")]
    kinds += [("model-free baseline", GREY, "D")] if baselines else []
    kinds += [("hardly changes with randomised weights", VERMILLION, "o")] if flagged else []
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=3.6, label=word) for word, colour, marker in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.set_figheight(figure.get_figheight() + 0.2)


def _line(name: str, own: Sequence[str], baselines: Sequence[str]) -> dict[str, object]:
    label = shortened(name, 24)
    if name in baselines:
        return {"color": GREY, "linestyle": "--" if baselines.index(name) else ":", "linewidth": 1.2, "label": label}
    index = own.index(name)
    style = _LINE_STYLES[(index // len(SERIES)) % len(_LINE_STYLES)]
    return {"color": SERIES[index % len(SERIES)], "linestyle": style, "linewidth": 1.3, "label": label}
