"""Curves of several models on logarithmic axes: one look a model, one legend a figure."""

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.style import SERIES

_MARKERS: Final = "osD^vP"


def positive(of: str, **columns: ArrayLike) -> list[Array]:
    """Columns (points,) of one model, checked: as many of each, all above 0. Raises InputError."""
    found = [as_array(values, name=f"{name} of {of}", axes=("points",)) for name, values in columns.items()]
    for name, values in zip(columns, found, strict=True):
        require_length(len(values), len(found[0]), name=f"{name} of {of}", of=next(iter(columns)))
        if values.min() <= 0:
            raise InputError(f"expected {name} of {of} above 0, found {values.min():g}")
    return found


def log_axes(axes: Axes) -> None:
    """Both axes logarithmic, with plain numbers where these are short. To be called when all is drawn."""
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


def look(index: int) -> tuple[str, str]:
    """Colour and marker of a model by its place."""
    return SERIES[index % len(SERIES)], _MARKERS[(index + index // len(SERIES)) % len(_MARKERS)]


def models_legend(figure: Figure, names: Sequence[str], *, columns: int = 3) -> None:
    """A legend of all models below the panels, which keep their height."""
    handles = [
        Line2D([], [], color=look(index)[0], marker=look(index)[1], markersize=3.6, label=name)
        for index, name in enumerate(names)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(names)))
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(names) // columns))
