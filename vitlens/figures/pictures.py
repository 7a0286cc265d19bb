"""Images side by side, without maps."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.inputs import as_images, require_length
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import SMALL, TALL, WIDE, shortened, styled

_ACROSS = 6  # most images side by side


@styled
def picture_grid(*, images: ArrayLike, names: Sequence[str] | None = None, title: str = "") -> Figure:
    """Images (batch, 3, height, width) in [0, 1], row by row, each with its name below.

    Raises InputError for other shapes or pixels, and another number of names.
    """
    pictures = as_images(images)
    require_length(len(names or pictures), len(pictures), name="names", of="the images")
    across = min(len(pictures), _ACROSS)
    ratio, below = pictures.shape[2] / pictures.shape[3], 0.22 if names else 0.07
    down = -(-len(pictures) // across)
    width = min((WIDE - 0.12) / across - 0.07, ((TALL - 0.5) / down - below) / ratio, 2.4)
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
            axes.set_xlabel(shortened(names[index], max(8, int(width / 0.065))), fontsize=SMALL, labelpad=2)
    without_frames(drawn.panels)
    return drawn.figure
