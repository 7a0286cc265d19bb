"""The head board of a study: what every head looks at, its label, and what its ablation costs."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.inputs import as_array
from vitlens.figures.style import GREY, MAGNITUDE, SMALL, TALL, VERMILLION, WIDE, drawable, styled

_LINE: Final = 0.115  # inch, of a line of text
_TEXT: Final = SMALL - 1.5  # points
_LETTER: Final = 0.055  # inch, of a letter at that size
_BESIDE: Final = 6  # heads of a layer up to which the texts stand beside the maps, otherwise below
_MAP: Final = 0.56  # inch
_LEFT: Final = 0.36  # inch, for the layers' numbers


@dataclass(frozen=True)
class DescribedHead:
    """One head: its map (rows, columns), raw, None where it has none; its label; the lines of numbers with it, each
    with whether it is significant, which is drawn in colour."""

    map: NDArray[np.floating] | None
    label: str
    numbers: tuple[tuple[str, bool], ...] = ()


def layers_on_a_page(heads: int, numbers: int = 3) -> int:
    """How many layers of so many heads, with so many lines of numbers, one figure holds."""
    return int((TALL - 1.0) / _row_height(heads, numbers))


@styled
def described_heads(
    *, heads: Mapping[tuple[int, int], DescribedHead], image: ArrayLike | None = None, title: str
) -> Figure:
    """Heads by (layer, head), both from 0: layers run down, heads across; each with its own colours.

    image: (3, height, width) in [0, 1], that the maps are of, drawn above them. Raises InputError without heads.
    """
    if not heads:
        raise InputError("expected at least one head, found none")
    layers, across = sorted({layer for layer, _ in heads}), max(head for _, head in heads) + 1
    lines = max(len(head.numbers) for head in heads.values())
    beside, step = across <= _BESIDE, (WIDE - _LEFT - 0.04) / across
    side = min(_MAP, step - 0.05)
    drawn = board(
        title=title,
        count=len(layers) * across,
        across=across,
        panel=(side, side),
        gap=(step - side, _row_height(across, lines) - side),
        margins=Margins(
            left=_LEFT,
            right=step - side + 0.04,
            top=0.2 if image is None else _MAP + 0.4,
            bottom=_row_height(across, lines) - side,
        ),
    )
    without_frames(drawn.panels)
    room = step - side - 0.08 if beside else step - 0.02
    for number, axes in enumerate(drawn.panels):
        row, head = divmod(number, across)
        described = heads.get((layers[row], head))
        if row == 0:
            axes.set_title(f"H{head}", fontsize=SMALL, pad=2)
        if head == 0:
            axes.set_ylabel(f"L{layers[row]}", fontsize=SMALL, rotation=0, ha="right", va="center", labelpad=3)
        if described is None:
            axes.set_axis_off()
        else:
            _draw(axes, described, int(room / _LETTER), beside=beside)
    if image is not None:
        shown = drawn.place(_LEFT, drawn.top - _MAP - 0.3, _MAP, _MAP)
        shown.imshow(np.moveaxis(as_array(image, name="image", axes=("3", "height", "width")), 0, -1))
        without_frames([shown])
        _write(shown, ["the image of the maps"], [(GREY, "normal")], beside=True)
    return drawn.figure


def _row_height(heads: int, numbers: int) -> float:
    """Of one layer, in inches: a map and, beside or below it, a label of two lines and the numbers."""
    text = _LINE * (2 + numbers)
    return max(_MAP, text) + 0.1 if heads <= _BESIDE else _MAP + text + 0.1


def _draw(axes: Axes, head: DescribedHead, letters: int, *, beside: bool) -> None:
    if head.map is None:
        axes.set_facecolor("#EEEEEE")
    else:
        axes.imshow(head.map, cmap=MAGNITUDE, vmin=0.0, aspect="auto")
    label = textwrap.wrap(drawable(head.label.replace("-", " ")), max(letters, 8), max_lines=2, placeholder="…")
    label = label if beside else [*label, *[""] * (2 - len(label))]  # the numbers of a row in line
    texts = [*label, *(text for text, _ in head.numbers)]
    numbers = [(VERMILLION if strong else GREY, "normal") for _, strong in head.numbers]
    _write(axes, texts, [*[("black", "bold")] * len(label), *numbers], beside=beside)


def _write(axes: Axes, texts: Sequence[str], looks: Sequence[tuple[str, str]], *, beside: bool) -> None:
    """Lines of text beside or below a panel, in their colours and weights."""
    for line, (text, (colour, weight)) in enumerate(zip(texts, looks)):
        axes.annotate(
            text,
            (1.0, 1.0) if beside else (0.5, 0.0),
            (3.0 if beside else 0.0, -(0.02 + _LINE * line) * 72),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="left" if beside else "center",
            va="top",
            fontsize=_TEXT,
            fontweight=weight,
            color=colour,
        )
