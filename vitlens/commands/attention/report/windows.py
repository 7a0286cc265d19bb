"""The section on a model's windows: which patches each holds, what shifting connects, and the mask."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from vitlens.commands.attention.record import MAPS, AttentionArrays
from vitlens.commands.attention.report.maps import pixels
from vitlens.commands.attention.window_rows import WINDOW_MAPS, WINDOWS, WindowArrays, WindowRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHOD: Final = (
    "Read from the weights on the first image: two patches meet where a head has any weight between them (more than "
    "1e-20, as some libraries mask with -100 added to the score). A part is a set of patches that meet the same "
    "patches. Reach: the patches of its stage's first map on which one patch depends through attention up to that "
    "layer, mean over up to 64 patches; it says what a patch can see, not what it uses. "
    "Places of padding attend to padding alone in our Swin."
)


def window_section(record: Record) -> Iterator[Section]:
    """The windows of each layer, where there are some."""
    rows = record.rows(WINDOWS)
    if not rows:
        return
    figures = [] if len(rows) < 2 else [_figure(record, rows)]
    yield Section(
        "Windows",
        (*_sentences(rows), *sentences(_METHOD, says="method")),
        (_table(rows),),
        tuple(figures),
        "Which patches can attend to which?",
        leading=True,
    )


def _sentences(rows: Sequence[WindowRow]) -> Iterator[Sentence]:
    """What each stage's windows hold, and what its later layers connect."""
    for size, layers in groupby(rows, key=lambda row: row.map):
        stage = list(layers)
        first, last = stage[0], stage[-1]
        words = (
            f"Layer {first.layer} cuts a map of {_size(size)} patches into {first.windows} "
            f"window{'' if first.windows == 1 else 's'} of {_size(first.window)}"
        )
        words += f", {first.padding} places of which are padding" if first.padding else ""
        connects = next((row for row in stage if row.new), None)
        if connects is not None and connects.new is not None:
            words += (
                f"; layer {connects.layer}, shifted by {_size(connects.shift)}, connects {connects.new:,} pairs of "
                f"patches that do not meet in the layer before, {number(100 * connects.new / connects.pairs)} % of its "
                f"pairs: the reach of a patch grows from {number(first.reach)} to {number(last.reach)} patches by the "
                "stage's last layer."
            )
        else:
            words += f"; no later layer of this map connects others, and the reach stays {number(last.reach)} patches."
        yield Sentence(words, (*stage, *_shares(stage)))


def _shares(stage: Sequence[WindowRow]) -> Iterator[float]:
    yield from (100 * row.new / row.pairs for row in stage if row.new)


def _table(rows: Sequence[WindowRow]) -> Table:
    return Table.of(
        "Windows by layer, in patches",
        rows,
        {
            "layer": lambda row: row.layer,
            "map": lambda row: _size(row.map),
            "window": lambda row: _size(row.window),
            "shift": lambda row: "none" if row.shift == (0, 0) else _size(row.shift),
            "windows": lambda row: row.windows,
            "parts": lambda row: row.parts,
            "padded places": lambda row: row.padding,
            "pairs that meet": lambda row: row.pairs,
            "of them new": lambda row: row.new,
            "reach": lambda row: round(row.reach, 1),
        },
    )


def _figure(record: Record, rows: Sequence[WindowRow]) -> FigureSpec:
    """Two layers after one another: the first pair of which the second connects something, else the first two."""
    index = next((place for place in range(1, len(rows)) if rows[place].new), 1)
    same = rows[index].map == rows[index - 1].map
    place = index if same else next((i for i in range(1, len(rows)) if rows[i].map == rows[i - 1].map), index)
    caption = (
        "From the left: the patches that attend to each other in two layers, each colour one part of a window "
        "(dotted: the borders of the layer before); the patches on which one patch (dot) depends after the first "
        "(clear) and after the second (orange); and which places of the second layer's last window may attend to which."
    )
    return FigureSpec("windows", caption, partial(_draw, rows, record.arrays(WINDOW_MAPS), record.arrays(MAPS), place))


def _draw(rows: Sequence[WindowRow], arrays: WindowArrays, maps: AttentionArrays, place: int) -> "Figure":
    from vitlens.figures.windows.layout import windows_and_shift

    before = place - 1 if rows[place - 1].map == rows[place].map else place
    return windows_and_shift(
        image=pixels(maps)[0],
        plain=arrays.part[before],
        shifted=arrays.part[place],
        reached_before=arrays.reach[before],
        reached_after=arrays.reach[place],
        mask=arrays.mask[place],
        patch=rows[place].patch,
        layers=(rows[before].layer, rows[place].layer),
    )


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
