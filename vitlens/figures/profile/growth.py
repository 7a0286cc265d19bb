"""Growth of the cost of models with the number of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import log_axes, models_legend, positive_columns, series_style
from vitlens.figures.inputs import Array, require_length
from vitlens.figures.style import WIDE, heading, sheet, shortened, styled

_DENSE: Final = 300.0  # greatest number of tokens by the least, from which only powers of ten have labels


@dataclass(frozen=True)
class Growth:
    """One model by number of tokens (points,): seconds of a pass (quartiles), FLOPs, and FLOPs of attention products.

    products: zeros without attention; exponents: fitted, of "latency", "flops" and, with attention, "products".
    """

    name: str
    tokens: ArrayLike
    low: ArrayLike
    median: ArrayLike
    high: ArrayLike
    flops: ArrayLike
    products: ArrayLike
    exponents: Mapping[str, float]


@styled
def growth_by_tokens(*, growths: Sequence[Growth], title: str = "Growth of cost with the number of tokens") -> Figure:
    """Latency and FLOPs against the number of tokens on log-log axes, each with its fitted power law as a line.

    In the right panel filled marks are all FLOPs, hollow ones the products of attention. The legend has the exponents.
    Raises InputError for no model, for shapes that do not fit, and for numbers that are not above 0.
    """
    if not growths:
        raise InputError("expected the growth of at least one model, found none")
    figure = sheet(WIDE, 2.6)
    left, right = figure.subplots(1, 2)
    for index, growth in enumerate(growths):
        colour, marker = series_style(index)
        tokens, low, median, high, flops = positive_columns(
            growth.name,
            tokens=growth.tokens, low=growth.low, median=growth.median, high=growth.high, flops=growth.flops,
        )  # fmt: skip
        left.vlines(tokens, 1000 * low, 1000 * high, color=colour, linewidth=1.0)
        _fitted(left, tokens, 1000 * median, growth.exponents["latency"], colour, marker, filled=True)
        _fitted(right, tokens, flops, growth.exponents["flops"], colour, marker, filled=True)
        if "products" in growth.exponents:
            (products,) = positive_columns(growth.name, products=growth.products)
            require_length(len(products), len(tokens), name="products", of="the tokens")
            _fitted(right, tokens, products, growth.exponents["products"], colour, marker, filled=False)
    left.set_ylabel("latency of a pass (ms)")
    right.set_ylabel("FLOPs of one image")
    right.set_title("filled marks: all FLOPs; hollow: attention products")
    left.set_title("marks: median, with quartiles; line: fitted power law")
    for axes in (left, right):
        log_axes(axes)
        axes.set_xlabel("tokens (of a CNN: positions of its first stage)")
        low, high = axes.get_xlim()
        subs = (1, 2, 5) if high / low < _DENSE else (1,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axes.xaxis.set_major_formatter("{x:g}")
    models_legend(figure, [_exponents(growth) for growth in growths], columns=1)
    heading(figure, title)
    return figure


def _exponents(growth: Growth) -> str:
    words = {"latency": "latency", "flops": "FLOPs", "products": "attention products"}
    fitted = [f"{word} ~ tokens^{growth.exponents[key]:.2f}" for key, word in words.items() if key in growth.exponents]
    return f"{shortened(growth.name, 30)}: {', '.join(fitted)}"


def _fitted(axes: Axes, x: Array, y: Array, power: float, colour: str, marker: str, *, filled: bool) -> None:
    """Points, and the least-squares line of this slope, which passes through the mean of the logarithms."""
    face = colour if filled else "white"
    ends = np.asarray([x.min(), x.max()])
    scale = np.exp(np.log(y).mean() - power * np.log(x).mean())
    axes.plot(ends, scale * ends**power, color=colour, linewidth=1.0, linestyle="-" if filled else "--")
    axes.plot(x, y, marker, color=colour, markersize=3.6, markerfacecolor=face, markeredgewidth=0.9)
