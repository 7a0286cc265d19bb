"""Curves of several models: the colour and marker of each, logarithmic axes, and a legend below the panels."""

from collections.abc import Iterable, Sequence
from typing import Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from vitlens.figures.style import SERIES

_MARKERS: Final = "osD^vP"


def log_axes(axes: Axes) -> None:
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


def series_style(index: int) -> tuple[str, str]:
    """The colour and marker of a model or an attack, by its index."""
    return SERIES[index % len(SERIES)], _MARKERS[(index + index // len(SERIES)) % len(_MARKERS)]


def models_legend(figure: Figure, names: Sequence[str], *, columns: int = 3, spare: Iterable[Axes] = ()) -> None:
    """A legend of all models: in the first of the panels that hold nothing, or else below the panels, which keep their
    height."""
    handles = []
    for index, name in enumerate(names):
        colour, marker = series_style(index)
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=3.6, label=name))
    legend_in(figure, handles, columns=columns, spare=spare)


def legend_in(figure: Figure, handles: Sequence[Artist], *, columns: int, spare: Iterable[Axes]) -> None:
    """The legend in the first of the panels that hold nothing, or below all panels; the other empty panels vanish."""
    empty = list(spare)
    for index, axes in enumerate(empty):
        axes.set_axis_off() if index == 0 else axes.set_visible(False)
    if empty:
        empty[0].legend(handles=handles, loc="center")
        return
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(handles) // columns))
