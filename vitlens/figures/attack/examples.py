"""Single images under attack: clean, perturbation, adversarial; attribution maps before, after, and the difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, PHOTOGRAPHS, Board, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import Scale, blend, colour_bar, enlarged, joint_scale
from vitlens.figures.style import SIGNED, SMALL, TALL, WIDE, WRONG, shortened, styled

_GAP: Final = 0.07  # inch between panels
_TEXT_ROOM: Final = 0.36  # inch below a panel, for two lines
_LETTER: Final = 0.062  # inch per letter
_ROUND: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256)


@dataclass(frozen=True)
class PredictedClass:
    """The caption of a panel: a class and its probability (a fraction)."""

    word: str
    probability: float


@styled
def attack_examples(
    *,
    clean: ArrayLike,
    adversarial: ArrayLike,
    maps_before: ArrayLike | None = None,
    maps_after: ArrayLike | None = None,
    before: Sequence[PredictedClass],
    after: Sequence[PredictedClass],
    notes: Sequence[str],
    title: str,
    map_name: str = "map",
) -> Figure:
    """Images (n, 3, height, width) in [0, 1] before and after an attack, one line per image, with maps if given.

    maps_before, maps_after: (n, rows, columns), not negative, that sum to 1, drawn relative to a uniform map, all with
    one scale; their difference with its own; notes: below each perturbation. The perturbation is drawn around mid-grey,
    amplified by a factor for all images, which its title names. Raises InputError when shapes do not fit.
    """
    pictures, changed = as_images(clean, name="clean"), as_images(adversarial, name="adversarial")
    if pictures.shape != changed.shape:
        raise InputError(f"expected adversarial images of shape {pictures.shape}, found {changed.shape}")
    count = len(pictures)
    for name, labels in (("before", before), ("after", after), ("notes", notes)):
        require_length(len(labels), count, name=name, of="the images")
    maps = _maps(maps_before, maps_after, count)
    across = 3 if maps is None else 6
    drawn = _board(title, count, across, pictures.shape[2] / pictures.shape[3], bars=maps is not None)
    times = amplification(changed - pictures)
    titles = ["clean", f"perturbation × {times}", "adversarial", f"{map_name} before", "after", "after − before"]
    scales = None if maps is None else (joint_scale(np.concatenate(maps)), _symmetric(maps[1] - maps[0]))
    for index in range(count):
        cells = drawn.panels[index * across : (index + 1) * across]
        letters = max(8, int(cells[0].get_position().width * drawn.figure.get_figwidth() / _LETTER))
        cells[0].imshow(enlarged(pictures[index]))
        _label(cells[0], before[index], letters)
        cells[1].imshow(enlarged(np.clip(0.5 + times * (changed[index] - pictures[index]), 0, 1)))
        cells[1].set_xlabel(notes[index], fontsize=SMALL, labelpad=2)
        cells[2].imshow(enlarged(changed[index]))
        _label(cells[2], after[index], letters, colour=None if after[index].word == before[index].word else WRONG)
        if maps is not None and scales is not None:
            cells[3].imshow(blend(pictures[index], maps[0][index], scale=scales[0]))
            cells[4].imshow(blend(changed[index], maps[1][index], scale=scales[0]))
            _draw_difference(cells[5], maps[1][index] - maps[0][index], scales[1], pictures[index])
        if index == 0:
            for axes, word in zip(cells, titles):
                axes.set_title(shortened(word, max(letters, 20)), fontsize=SMALL)
    without_frames(drawn.panels)
    if scales is not None:
        _bars(drawn, scales)
    return drawn.figure


def amplification(changes: Array) -> int:
    """The greatest round factor at which every perturbation stays within the range of colours; at least 1."""
    largest = float(np.abs(changes).max(initial=0.0))
    if largest <= 0:
        return 1
    return max([factor for factor in _ROUND if factor * largest <= 0.5 * 1.001], default=1)


def _maps(before: ArrayLike | None, after: ArrayLike | None, count: int) -> tuple[Array, Array] | None:
    if before is None and after is None:
        return None
    if before is None or after is None:
        raise InputError("expected maps before and after, found one of them")
    pair = [as_array(maps, name="maps", axes=("batch", "rows", "columns")) for maps in (before, after)]
    if pair[0].shape != pair[1].shape:
        raise InputError(f"expected maps after of shape {pair[0].shape}, found {pair[1].shape}")
    require_length(len(pair[0]), count, name="maps", of="the images")
    cells = pair[0].shape[1] * pair[0].shape[2]
    return pair[0] * cells, pair[1] * cells


def _symmetric(difference: Array) -> Scale:
    most = float(np.percentile(np.abs(difference), 99.5)) or 1.0
    return Scale(-most, most, clipped=bool(np.abs(difference).max() > most))


def _board(title: str, count: int, across: int, ratio: float, *, bars: bool) -> Board:
    room = WIDE - (BAR_ROOM if bars else 0.0) - 0.12
    width = min(
        room / across - _GAP, ((TALL - 0.8) / count - _TEXT_ROOM - _GAP) / ratio,
        (PHOTOGRAPHS / (count * across * ratio)) ** 0.5, 1.4,
    )  # fmt: skip
    margins = Margins(right=BAR_ROOM if bars else 0.06, top=0.2, bottom=_TEXT_ROOM)
    return board(
        title=title, count=count * across, across=across, panel=(width, width * ratio), gap=(_GAP, _TEXT_ROOM + _GAP),
        margins=margins,
    )  # fmt: skip


def _label(axes: Axes, caption: PredictedClass, letters: int, *, colour: str | None = None) -> None:
    below = f"{shortened(caption.word, letters)}\n{100 * caption.probability:.0f} %"
    axes.set_xlabel(below, fontsize=SMALL, labelpad=2, color=colour or "black")


def _draw_difference(axes: Axes, values: Array, scale: Scale, picture: Array) -> None:
    axes.imshow(values, cmap=SIGNED, norm=scale.norm, interpolation="nearest", aspect="auto")
    axes.set_box_aspect(picture.shape[1] / picture.shape[2])


def _bars(drawn: Board, scales: tuple[Scale, Scale]) -> None:
    """Add two colour bars at the right, one above the other: of the maps, and of their difference."""
    whole = drawn.bar()
    box = whole.get_position()
    whole.remove()
    half = box.height * 0.44
    figure = drawn.figure
    upper = figure.add_axes((box.x0, box.y0 + box.height - half, box.width, half))
    lower = figure.add_axes((box.x0, box.y0, box.width, half))
    colour_bar(upper, scale=scales[0], label="× uniform")
    colour_bar(lower, scale=scales[1], label="difference", colours=SIGNED, both=True)
