"""Parameters and FLOPs of models by part."""

from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitlens.errors import InputError
from vitlens.figures.profile.counts import in_thousands
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


@styled
def cost_by_part(
    *,
    parameters: Mapping[str, Mapping[str, int]],
    flops: Mapping[str, Mapping[str, int]],
    title: str = "Parameters and FLOPs by part",
) -> Figure:
    """Two panels of stacked bars, one per model: shares of its parameters and of its FLOPs for one image, by part.

    parameters, flops: by model, by part in the order of a forward pass; the total is written beside each bar. Parts of
    a model with tokens are coloured as in COLOURS, the stages of a CNN in greys. Raises InputError for a part that has
    no colour, for other models in flops, and for a model without parameters or FLOPs.
    """
    if list(parameters) != list(flops) or not parameters:
        raise InputError(f"expected the same models twice, found {list(parameters)} and {list(flops)}")
    every = [*parameters.values(), *flops.values()]
    parts = sorted({part for counts in every for part, count in counts.items() if count}, key=_place)
    colours = {part: _colour(part, parts) for part in parts}
    figure = sheet(WIDE, 0.45 + 0.36 * len(parameters))
    left, right = figure.subplots(1, 2, sharey=True)
    _stacks(left, parameters, colours, "")
    _stacks(right, flops, colours, "FLOPs")
    left.set_title("Parameters (% of the model's)")
    right.set_title("FLOPs of one image (% of the model's)")
    left.set_yticks(range(len(parameters)), [shortened(name, 30) for name in parameters])
    left.set_ylim(len(parameters) - 0.5, -0.5)
    handles = [Patch(facecolor=colours[part], edgecolor="#666666", linewidth=0.4, label=part) for part in parts]
    columns = min(5, len(parts))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(parts) // columns))
    heading(figure, f"{title}; beside each bar: the total")
    return figure


def _place(part: str) -> tuple[int, int]:
    """The order of parts in the legend. Raises InputError for a part without a colour."""
    word, _, number = part.rpartition(" ")
    if word == "stage" and number.isdecimal():
        return list(COLOURS).index(word), int(number)
    if part not in COLOURS:
        raise InputError(f"expected parts {', '.join(COLOURS)}, found {part!r}")
    return list(COLOURS).index(part), 0


def _colour(part: str, parts: Sequence[str]) -> str:
    """The colour of a part; for a stage a grey by its place among all stages."""
    stages = sorted((other for other in parts if other.startswith("stage ")), key=_place)
    if part in stages:
        return str(0.88 - 0.5 * stages.index(part) / max(len(stages) - 1, 1))
    return COLOURS[part]


def _stacks(axes: Axes, models: Mapping[str, Mapping[str, int]], colours: Mapping[str, str], unit: str) -> None:
    for place, (name, counts) in enumerate(models.items()):
        total = sum(counts.values())
        if total <= 0:
            raise InputError(f"expected {unit or 'parameters'} of {name}, found none")
        start = 0.0
        for part, count in ((part, count) for part, count in counts.items() if count):
            share = 100 * count / total
            axes.barh(place, share, 0.7, left=start, color=colours[part], edgecolor="#666666", linewidth=0.4)
            if share >= 100 * _LABELLED:
                ink = "white" if sum(to_rgb(colours[part])) < 1.6 else "black"
                axes.text(start + share / 2, place, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=SMALL)
            start += share
        axes.text(102, place, f"{in_thousands(total)}{unit}".rstrip(), va="center", fontsize=SMALL)
    axes.set_xlim(0, 100)
    axes.grid(axis="x")
