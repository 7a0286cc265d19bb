"""Images side by side, alone or each with its map."""

from collections.abc import Sequence
from itertools import chain
from textwrap import wrap
from typing import Final

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.board import BAR_ROOM, PHOTOGRAPHS, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import as_array, as_images, require_length
from vitlens.figures.overlay import OPACITY, blend, colour_bar, enlarged, is_constant, joint_scale
from vitlens.figures.style import SMALL, TALL, WIDE, drawable, shortened, styled

_ACROSS: Final = 6  # most images side by side
_BELOW: Final = 0.22  # inch below a panel, for a line of small letters
_LETTER: Final = 0.065  # inch per letter of a name
_LARGEST: Final = 2.4  # inch, the widest panel


@styled
def picture_grid(*, images: ArrayLike, names: Sequence[str] | None = None, title: str = "") -> Figure:
    """Images (batch, 3, height, width) in [0, 1], row by row, each with its name below.

    Raises InputError for other shapes or pixels, and another number of names.
    """
    pictures = as_images(images)
    require_length(len(names or pictures), len(pictures), name="names", of="the images")
    across = min(len(pictures), _ACROSS)
    ratio, below = pictures.shape[2] / pictures.shape[3], _BELOW if names else 0.07
    down = -(-len(pictures) // across)
    width = min((WIDE - 0.12) / across - 0.07, ((TALL - 0.5) / down - below) / ratio, _LARGEST)
    drawn = board(
        title=title,
        count=len(pictures),
        across=across,
        panel=(width, width * ratio),
        gap=(0.07, below),
        margins=Margins(bottom=below),
    )
    for index, (axes, picture) in enumerate(zip(drawn.panels, pictures)):
        axes.imshow(enlarged(picture))
        if names:
            axes.set_xlabel(shortened(names[index], max(8, int(width / _LETTER))), fontsize=SMALL, labelpad=2)
    without_frames(drawn.panels)
    return drawn.figure


@styled
def map_grid(
    *, images: ArrayLike, maps: ArrayLike, title: str, label: str, names: Sequence[str] | None = None
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1] side by side, each with its map (batch, rows, columns) below it.

    All maps have one colour scale; label: their unit, at the colour bar; names: one per image. A uniform map is not
    drawn but crossed out. Raises InputError for other shapes, another number of maps or names, or a number that is not
    finite.
    """
    pictures = as_images(images)
    values = as_array(maps, name="maps", axes=("batch", "rows", "columns"))
    require_length(len(values), len(pictures), name="maps", of="the images")
    require_length(len(names or pictures), len(pictures), name="names", of="the images")
    lines = -(-len(pictures) // _ACROSS)
    across = -(-len(pictures) // lines)
    ratio = pictures.shape[2] / pictures.shape[3]
    most = (WIDE - BAR_ROOM - 0.06) / across - 0.07
    letters = max(8, int(min(most, _LARGEST) / _LETTER))
    captions = [wrap(drawable(name), letters, max_lines=3, placeholder="…") for name in names or ()]
    below = _BELOW + 0.14 * (max(map(len, captions), default=1) - 1)
    below = below if names else 0.07
    room = most, ((TALL - 0.5) / lines - below) / ratio / 2 - 0.07
    width = min(*room, (PHOTOGRAPHS / (2 * len(pictures) * ratio)) ** 0.5, _LARGEST)
    drawn = board(
        title=title,
        count=2 * lines * across,
        across=across,
        panel=(width, width * ratio),
        gap=(0.07, below),
        margins=Margins(right=BAR_ROOM, bottom=below),
    )
    scale = joint_scale(values)
    rows = [drawn.panels[start : start + across] for start in range(0, len(drawn.panels), across)]
    inputs, overlays = (list(chain.from_iterable(rows[first::2])) for first in (0, 1))
    for axes in (*inputs[len(pictures) :], *overlays[len(pictures) :]):
        axes.set_axis_off()
    for index, (above, under, picture) in enumerate(zip(inputs, overlays, pictures)):
        above.imshow(enlarged(picture))
        uniform = is_constant(values[index])
        under.imshow(blend(picture, values[index], scale=scale, opacity=0.0 if uniform else OPACITY))
        if names:
            above.set_xlabel("\n".join(captions[index]), fontsize=SMALL, labelpad=2)
        if uniform:
            cross_out(under, "uniform")
    without_frames(drawn.panels)
    colour_bar(drawn.bar(), scale=scale, label=label)
    return drawn.figure
