"""The specialisation of every head on one page: the mean weight of keys by offset from the query, and the label."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from vitlens.analysis.heads.labels import LABELS
from vitlens.charts.overlay import Array, no_value
from vitlens.charts.panels import Board, Margins, board, size_of
from vitlens.charts.style import MAGNITUDE, SMALL, TALL, WIDE, styled, wrapped_title

LOW, HIGH = -3, 5  # the range of colours, as powers of two
_GAP: Final = 0.07  # inch
_CODE_ROOM: Final = 0.13  # inch below a panel for its code
_SMALLEST, _SCORED = 0.34, 0.4  # inch, the narrowest panels with a code, and with a score
_BAR: Final = 0.55  # inch below the panels for the colour bar
_WHITE: Final = 0.03  # inch between the middle of the frame and the map
_LEGEND: Final = 0.18  # inch below the colour bar for each line of the legend
_COLUMNS, _MOST_COLUMNS = 3, 5  # of the legend, the second where it has more than _FEW labels
_FEW: Final = 12
_LEAST: Final = 5.2  # inch of width, for the legend


@styled
def specialisation_matrix(
    *, ratios: Sequence[Array | None], labels: Sequence[Sequence[str]], scores: Sequence[Sequence[float]],
    layers: Sequence[int], title: str,
) -> Figure:  # fmt: skip
    """One panel per head: the weight of keys by their offset from the query, framed in the colour of the head's label.

    ratios: for each layer (heads, 2 rows - 1, 2 columns - 1), the mean weight at an offset (key minus query, the query
    itself in the middle) over that of uniform attention: 1 is uniform; NaN where an offset never occurs; None for a
    layer without patches as queries, hatched as NaN is. Layers may differ in heads and grid. Colours are logarithmic,
    from 1/8 to 32 times uniform for all panels. labels: of each head, names of LABELS; scores: the highest of each
    head, NaN where it has none; code and score are below a panel where there is room. layers: their numbers. Layers
    run down, or across where they are more than twice as many as heads.
    """
    maps = [None if own is None else np.log2(np.clip(own, 2.0**LOW, 2.0**HIGH)) for own in ratios]
    depth, most = len(labels), max(map(len, labels))
    across = depth > 2 * most
    counts = Counter(label for layer in labels for label in layer)
    title = f"{title}: mean weight of keys by offset from the query (ticks: the query itself)"
    drawn = _board(title, maps, (most, depth) if across else (depth, most), len(counts))
    panels = np.array(drawn.panels, dtype=object)
    cells = panels.reshape(most, depth).T if across else panels.reshape(depth, most)
    size = size_of(drawn.panels[0])
    for (layer, head), axes in np.ndenumerate(cells):
        axes.set(xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
        if head < len(labels[layer]):
            values, label = maps[layer], labels[layer][head]
            _draw(axes, None if values is None else values[head], LABELS[label].colour, size)
            if size[0] >= _SMALLEST:
                _write(axes, label, scores[layer][head], size[0])
    _name_layers_and_heads(cells, layers, across=across, narrow=size[0] < _SCORED)
    _colour_bar(drawn)
    _legend(drawn.figure, counts)
    return drawn.figure


def _board(title: str, maps: Sequence[Array | None], lines: tuple[int, int], labels: int) -> Board:
    """The panels, as large as the page allows, with room for codes below them where they are wide enough; labels:
    how many the legend has."""
    down, across = lines
    least = _LEAST if labels <= _FEW else WIDE
    ratio = next((values.shape[1] / values.shape[2] for values in maps if values is not None), 1.0)
    margins = Margins(
        left=0.62, right=0.08, top=0.22, bottom=_CODE_ROOM + _BAR + _LEGEND * -(-labels // _columns(labels))
    )
    room = (
        WIDE - margins.left - margins.right + _GAP,
        TALL - wrapped_title(title, least)[1] - margins.top - margins.bottom,
    )
    wide = min(room[0] / across - _GAP, 0.9)
    with_code = min(wide, ((room[1] + _GAP) / down - _GAP - _CODE_ROOM) / ratio)
    has_codes = with_code >= _SMALLEST
    panel = with_code if has_codes else min(wide, ((room[1] + _GAP) / down - _GAP) / ratio)
    missing = max(0.0, least - WIDE + room[0] - across * (panel + _GAP))
    return board(
        title=title,
        count=down * across,
        across=across,
        panel=(panel, panel * ratio),
        gap=(_GAP, _GAP + (_CODE_ROOM if has_codes else 0.0)),
        margins=replace(margins, left=margins.left + missing / 2, right=margins.right + missing / 2),
    )


def _draw(axes: Axes, values: Array | None, colour: str, size: tuple[float, float]) -> None:
    """Draw one head's map in its frame, with a tick at the middle of each side; hatched without values."""
    axes.spines[:].set(visible=True, color=colour, linewidth=1.8)
    rows, columns = (1, 1) if values is None else values.shape
    no_value(axes)
    if values is not None:
        axes.imshow(values, cmap=MAGNITUDE, norm=Normalize(LOW, HIGH), aspect="auto")
        axes.set(xticks=[columns // 2], yticks=[rows // 2], xticklabels=[], yticklabels=[])
        axes.tick_params(direction="in", top=True, right=True)
    # white between the frame and the map, so that their colours do not mix
    across, down = _WHITE * columns / size[0], _WHITE * rows / size[1]
    axes.set(xlim=(-0.5 - across, columns - 0.5 + across), ylim=(rows - 0.5 + down, -0.5 - down))


def _write(axes: Axes, label: str, score: float, wide: float) -> None:
    """Write the label's code below a panel of this width in inches, and the score where there is room."""
    number = "" if np.isnan(score) or wide < _SCORED else f" {score:.2f}".replace(" 0.", " .")
    size = max(5.0, min(SMALL, 11.5 * wide))
    where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "va": "top"}
    axes.annotate(LABELS[label].code + number, (0.5, 0), (0, -2.2), size=size, **where)


def _name_layers_and_heads(cells: NDArray[np.object_], layers: Sequence[int], *, across: bool, narrow: bool) -> None:
    heads = range(cells.shape[1])
    for word, line, above, numbers in (("layer", cells[:, 0], across, layers), ("head", cells[0], not across, heads)):
        for index, (axes, number) in enumerate(zip(line, numbers, strict=True)):
            name = f"{number}" if index else f"{word} {number}"
            if above:
                axes.set_title(name, loc="right" if index == 0 and narrow else "center")
            else:
                axes.set_ylabel(name, rotation=0, ha="right", va="center")


def _colour_bar(drawn: Board) -> None:
    """Add the colour bar of all panels below them."""
    long = min(max(drawn.right - drawn.left, 2.2), 3.2)
    axes = drawn.place((drawn.left + drawn.right - long) / 2, drawn.bottom + _CODE_ROOM + 0.08, long, 0.09)
    bar = drawn.figure.colorbar(ScalarMappable(Normalize(LOW, HIGH), MAGNITUDE), cax=axes, orientation="horizontal")
    bar.outline.set_visible(False)
    powers = range(LOW, HIGH + 1)
    names = [f"1/{2**-power}" if power < 0 else str(2**power) for power in powers]
    bar.set_ticks(list(powers), labels=[f"≤ {names[0]}", *names[1:-1], f"≥ {names[-1]}"])
    bar.set_label("weight, times uniform (log scale); hatched: never occurs")


def _legend(figure: Figure, counts: Counter[str]) -> None:
    """Add a legend at the lower edge: every label of a head with its code, colour and number of heads."""
    known = {name: row for name, row in LABELS.items() if counts[name]}
    named = [name if name == row.code else f"{name} ({row.code})" for name, row in known.items()]
    handles = [
        Patch(facecolor="none", edgecolor=row.colour, linewidth=1.8, label=f"{words}: {counts[name]}")
        for (name, row), words in zip(known.items(), named)
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=_columns(len(handles)), borderaxespad=0.3, handlelength=1.2
    )


def _columns(labels: int) -> int:
    return _COLUMNS if labels <= _FEW else _MOST_COLUMNS
