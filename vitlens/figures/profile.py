"""What models cost: where parameters and FLOPs are, and how fast they are by batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import log_axes, look, models_legend, positive
from vitlens.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

# A part's colour; the stages of a CNN are greys, darker with depth.
COLOURS: Final[Mapping[str, str]] = {
    "patch embedding": ORANGE,
    "positions and tokens": SKY,
    "attention projections": BLUE,
    "attention products": VERMILLION,
    "MLP": GREEN,
    "norms": PURPLE,
    "between stages": "#8C6D31",
    "head": "#222222",
    "stem": "#F0E442",
    "stage": "#999999",
    "convolutions": "#999999",
    "other": "#FFFFFF",
}
_LABELLED: Final = 0.09  # share of a bar from which on a segment has room for its number


@dataclass(frozen=True)
class Speed:
    """One model by batch size: seconds of a pass, lower quartile, median and upper quartile, each (batch sizes,)."""

    name: str
    batch_sizes: Sequence[int]
    low: ArrayLike
    median: ArrayLike
    high: ArrayLike


@styled
def cost_by_part(
    *,
    parameters: Mapping[str, Mapping[str, int]],
    flops: Mapping[str, Mapping[str, int]],
    title: str = "Where parameters and FLOPs are",
) -> Figure:
    """Two panels of stacked bars, a bar a model: shares of its parameters and of its FLOPs for one image, by part.

    parameters, flops: by model, by part in the order of a forward pass; the total stands beside each bar. Parts of a
    model with tokens are coloured as in COLOURS, "stage 1" and so on in greys. Raises InputError for a part that has
    no colour, for other models in flops, and for a model without parameters or FLOPs.
    """
    if list(parameters) != list(flops) or not parameters:
        raise InputError(f"expected the same models twice, found {list(parameters)} and {list(flops)}")
    every = [*parameters.values(), *flops.values()]
    parts = sorted({part for counts in every for part, count in counts.items() if count}, key=_place)
    looks = {part: _colour(part, parts) for part in parts}
    figure = sheet(WIDE, 0.45 + 0.36 * len(parameters))
    left, right = figure.subplots(1, 2, sharey=True)
    _stacks(left, parameters, looks, "")
    _stacks(right, flops, looks, "FLOPs")
    left.set_title("Parameters (% of the model's)")
    right.set_title("FLOPs of one image (% of the model's)")
    left.set_yticks(range(len(parameters)), [shortened(name, 30) for name in parameters])
    left.set_ylim(len(parameters) - 0.5, -0.5)
    handles = [Patch(facecolor=looks[part], edgecolor="#666666", linewidth=0.4, label=part) for part in parts]
    columns = min(5, len(parts))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(parts) // columns))
    heading(figure, f"{title}; beside each bar: the total")
    return figure


def _place(part: str) -> tuple[int, int]:
    """Where a part stands in the legend. Raises InputError for one that has no colour."""
    word, _, number = part.rpartition(" ")
    if word == "stage" and number.isdecimal():
        return list(COLOURS).index(word), int(number)
    if part not in COLOURS:
        raise InputError(f"expected parts {', '.join(COLOURS)}, found {part!r}")
    return list(COLOURS).index(part), 0


def _colour(part: str, parts: Sequence[str]) -> str:
    """The part's own; a stage's grey by its place among all stages."""
    word, _, number = part.rpartition(" ")
    if word == "stage" and number.isdecimal():
        most = max(int(other.rpartition(" ")[2]) for other in parts if other.startswith("stage "))
        return str(0.88 - 0.5 * (int(number) - 1) / max(most - 1, 1))
    return COLOURS[part]


def _stacks(axes: Axes, models: Mapping[str, Mapping[str, int]], looks: Mapping[str, str], unit: str) -> None:
    for place, (name, counts) in enumerate(models.items()):
        total = sum(counts.values())
        if total <= 0:
            raise InputError(f"expected {unit or 'parameters'} of {name}, found none")
        start = 0.0
        for part, count in ((part, count) for part, count in counts.items() if count):
            share = 100 * count / total
            axes.barh(place, share, 0.7, left=start, color=looks[part], edgecolor="#666666", linewidth=0.4)
            if share >= 100 * _LABELLED:
                ink = "white" if sum(to_rgb(looks[part])) < 1.6 else "black"
                axes.text(start + share / 2, place, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=SMALL)
            start += share
        axes.text(102, place, f"{in_thousands(total)}{unit}".rstrip(), va="center", fontsize=SMALL)
    axes.set_xlim(0, 100)
    axes.grid(axis="x")


def in_thousands(count: int | float) -> str:
    """ "2.69 M": three digits and the prefix of the unit that follows."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}"
    return f"{count:.3g} "


@styled
def speed_by_batch(*, speeds: Sequence[Speed], title: str = "How fast, by batch size") -> Figure:
    """Latency of a pass and throughput against the batch size, medians as lines, quartiles as bands; log axes.

    Raises InputError for no model, for shapes that do not fit, and for a time that is not above 0.
    """
    if not speeds:
        raise InputError("expected the speed of at least one model, found none")
    figure = sheet(WIDE, 2.5)
    left, right = figure.subplots(1, 2)
    every: set[int] = set()
    for index, speed in enumerate(speeds):
        sizes, low, median, high = positive(
            speed.name, batch_sizes=list(speed.batch_sizes), low=speed.low, median=speed.median, high=speed.high
        )
        every |= {int(size) for size in sizes}
        colour, marker = look(index)
        for axes, line, ends in (
            (left, 1000 * median, (1000 * low, 1000 * high)),
            (right, sizes / median, (sizes / high, sizes / low)),
        ):
            axes.fill_between(sizes, *ends, color=colour, alpha=0.22, linewidth=0)
            axes.plot(sizes, line, color=colour, marker=marker, markersize=3.2)
    for axes, name in ((left, "latency of a pass (ms)"), (right, "throughput (images/s)")):
        log_axes(axes)
        axes.set_xlabel("batch size (images)")
        axes.set_ylabel(name)
        shown = _spaced(sorted(every))
        axes.set_xticks(shown, [str(size) for size in shown])
        axes.set_xlim(min(every) / 1.15, max(every) * 1.15)
    models_legend(figure, [speed.name for speed in speeds])
    heading(figure, f"{title}; line: median, band: quartiles")
    return figure


def _spaced(sizes: Sequence[int]) -> list[int]:
    """Those batch sizes whose labels do not touch on a logarithmic axis."""
    shown: list[int] = []
    step = max(1.5, (sizes[-1] / sizes[0]) ** (1 / 10))
    for size in sizes:
        if not shown or size >= step * shown[-1]:
            shown.append(size)
    return shown
