"""What `vitlens look` shows in the terminal: classes, heads and, where there is room, the maps as coloured blocks."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitlens.commands.look.record import LOOK, MAPS
from vitlens.commands.look.report import classes_of, digits_words, heads_of, names_of
from vitlens.display import for_terminal
from vitlens.records import Record

SHOWN: Final = 4  # images
_SIDES: Final = (16, 36)  # columns of a picture, at least and at most
_BAR: Final = 20  # characters of a probability of 1
_UPPER: Final = "▀"

Pixels = NDArray[np.floating[Any]]  # (height, width, 3) in [0, 1]


def print_look(record: Record, console: Console | None = None) -> None:
    """Print what was seen in the first images on standard error, so that stdout stays for the report's path."""
    console = console or Console(stderr=True)
    (row,) = record.rows(LOOK)
    if row.digits:
        console.print(Text(digits_words(record.aliases[0]).replace("**", ""), style="bold"), soft_wrap=True)
    names = names_of(record)
    for index, name in enumerate(names[:SHOWN]):
        console.print(Text(for_terminal(name), style="bold"))
        for line in _pictures(record, index, console):
            console.print(line, no_wrap=True, overflow="crop")
        console.print(_classes(record, index))
        console.print(_heads(record, index, row.images) if row.heads else Text("no heads to ablate"))
    if len(names) > SHOWN:
        console.print(f"the report shows all {len(names)} images", markup=False, highlight=False)
    if row.note:
        console.print(Text(row.note), soft_wrap=True)


def _classes(record: Record, index: int) -> Table:
    """The most probable classes with bars."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for each in classes_of(record, index):
        bar = "█" * round(_BAR * each.probability)
        table.add_row(Text(f"{100 * each.probability:5.1f} %"), Text(for_terminal(each.name)), Text(bar, style="cyan"))
    return table


def _heads(record: Record, index: int, images: int) -> Table:
    """The heads that matter most, and what they attend to."""
    first = classes_of(record, index)[0]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("head", f"without it, of {100 * first.probability:.1f} %", "attends to"):
        table.add_column(title)
    for each in heads_of(record, index):
        table.add_row(each.name, f"{100 * each.probability:.1f} %", Text(each.words(images)))
    return table


def _pictures(record: Record, index: int, console: Console) -> Iterator[Text]:
    """The image and its maps beside one another, two pixels a character; none where there is no room or no colour."""
    arrays = record.arrays(MAPS)
    maps = [arrays.prediction[index], *([] if arrays.runner_up is None else [arrays.runner_up[index]])]
    side = min(_SIDES[1], (console.width - 2) // (1 + len(maps)) - 2)
    if not console.is_terminal or console.color_system not in ("truecolor", "256") or side < _SIDES[0]:
        return
    from vitlens.figures.overlay import Scale, blend

    picture = arrays.pixels[index] / np.float32(255)
    panels = [picture.transpose(1, 2, 0)]
    for values in maps:
        positive = np.clip(np.nan_to_num(values), 0, None)
        panels.append(blend(picture, positive / (positive.max() or 1), scale=Scale(0.0, 1.0)))
    named = ["", *(for_terminal(each.name) for each in classes_of(record, index))]
    small = [_reduced(panel, side) for panel in panels]
    yield Text("  ".join(f"{name[:side]:<{side}}" for name in named[: len(small)]))
    for row in range(0, len(small[0]) - 1, 2):
        line = Text()
        for panel in small:
            for upper, lower in zip(panel[row], panel[row + 1]):
                line.append(_UPPER, style=f"rgb({_rgb(upper)}) on rgb({_rgb(lower)})")
            line.append("  ")
        yield line


def _reduced(pixels: Pixels, width: int) -> Pixels:
    """Pixels averaged to this width, and a height in proportion."""
    height = max(2, round(pixels.shape[0] * width / pixels.shape[1] / 2) * 2)
    rows, columns = (
        np.minimum(np.arange(count * 4) * size // (count * 4), size - 1)
        for count, size in ((height, pixels.shape[0]), (width, pixels.shape[1]))
    )
    return np.asarray(pixels[rows][:, columns].reshape(height, 4, width, 4, 3).mean((1, 3)))


def _rgb(pixel: Pixels) -> str:
    return ",".join(str(round(255 * float(value))) for value in pixel)
