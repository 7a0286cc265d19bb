"""Large overlays of an image, one panel per layer, head or epoch, with one colour scale."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from vitlens.figures.board import BAR_ROOM, PHOTOGRAPHS, Board, Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import as_array, as_images, require_length
from vitlens.figures.overlay import OPACITY, Scale, blend, colour_bar, enlarged, is_constant, joint_scale
from vitlens.figures.style import SMALL, TALL, WIDE, styled

Patch = tuple[int, int]
_ACROSS = 7  # most panels side by side; more are divided into lines
_LINES = 6  # lines of large panels on a page
_NARROW = 10  # characters of a caption that fit below any panel
_LETTER = 0.065  # inch per letter of a caption


def images_on_a_page(panels: int) -> int:
    """The number of images that fit on a page when each has this many panels; at least one."""
    return max(1, _LINES // _lines(panels))


def shared_scale(maps: Sequence[ArrayLike]) -> Scale:
    """One colour scale in % for maps (batch, rows, columns) of any grids; see joint_scale."""
    values = [100 * as_array(panel, name="maps", axes=("batch", "rows", "columns")).ravel() for panel in maps]
    return joint_scale(np.concatenate(values)[None, None])


@styled
def panel_view(
    *,
    images: ArrayLike,
    maps: Sequence[ArrayLike],
    titles: Sequence[str],
    title: str,
    names: Sequence[str] | None = None,
    patches: Sequence[Patch] | None = None,
    scale: Scale | None = None,
    smooth: bool = True,
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], each followed by large overlays of its maps, with one scale.

    maps: for each panel (batch, rows, columns), fractions, whose grids may differ; titles: of panels; names: of images;
    patches: (row, column) from 0 to outline, for each panel in its grid, the first also on the input;
    scale: in %, see shared_scale (default: that of these maps). Raises InputError when shapes do not fit or a number is
    not finite. A uniform map is not drawn but crossed out.
    """
    pictures = as_images(images)
    values = [100 * as_array(panel, name="maps", axes=("batch", "rows", "columns")) for panel in maps]
    require_length(len(titles), len(values), name="titles", of="the maps of an image")
    require_length(len(patches or values), len(values), name="patches", of="the maps of an image")
    require_length(len(names or pictures), len(pictures), name="names", of="the images")
    for value in values:
        require_length(len(value), len(pictures), name="maps in a panel", of="the images")
    shared = scale or shared_scale(maps)
    drawn = _board(title, len(pictures), len(values), ratio=pictures.shape[2] / pictures.shape[3], names=names or ())
    outlined = list(zip(patches or (), values))
    for index, (picture, own) in enumerate(zip(pictures, np.split(np.array(drawn.panels), len(pictures)))):
        above = index == 0 or _lines(len(values)) > 1
        own[0].imshow(enlarged(picture))
        _write(own[0], "input" if above else "", names[index] if names else "")
        for axes, value, word in zip(own[1:], values, titles):
            uniform = is_constant(value[index])
            axes.imshow(blend(picture, value[index], scale=shared, smooth=smooth, opacity=0.0 if uniform else OPACITY))
            _write(axes, word if above else "", "")
            if uniform:
                cross_out(axes, "uniform")
        for axes, (patch, value) in zip(own, outlined[:1] + outlined):
            _outline(axes, patch, value.shape[1:])
        for spare in own[1 + len(values) :]:
            spare.remove()
    without_frames(drawn.figure.axes)
    colour_bar(drawn.bar(), scale=shared, label="attention (%)")
    return drawn.figure


def _lines(panels: int) -> int:
    """The number of lines of one image with this many panels."""
    return -(-(panels + 1) // _ACROSS)


def _board(title: str, batch: int, panels: int, *, ratio: float, names: Sequence[str]) -> Board:
    lines = _lines(panels)
    across, down = -(-(panels + 1) // lines), lines * batch
    caption_room = 0.36 if any(len(name) > _NARROW for name in names) else 0.22  # captions of two lines, or of one
    gap = (0.07, caption_room + (0.16 if lines > 1 else 0.0))
    width = min(
        (WIDE - BAR_ROOM - 0.06) / across - gap[0],
        ((TALL - 0.7) / down - gap[1]) / ratio,
        (PHOTOGRAPHS / (across * down * ratio)) ** 0.5,
        1.7,
    )
    return board(
        title=title,
        count=across * down,
        across=across,
        panel=(width, width * ratio),
        gap=gap,
        # the first caption may be wider than a narrow panel
        margins=Margins(left=max(0.06, (_NARROW * _LETTER - width) / 2), right=BAR_ROOM, top=0.22, bottom=caption_room),
    )


def _write(axes: Axes, above: str, below: str) -> None:
    axes.set_title(above)
    wide = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    lines = textwrap.wrap(below, max(_NARROW, int(wide / _LETTER)), max_lines=2, placeholder="…")
    axes.set_xlabel("\n".join(lines), fontsize=SMALL, labelpad=2)


def _outline(axes: Axes, patch: Patch, grid: tuple[int, ...]) -> None:
    """Draw the border of one patch in white over black, visible on any background."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    tall, wide = height / grid[0], width / grid[1]
    corner = (patch[1] * wide - 0.5, patch[0] * tall - 0.5)
    for colour, thickness in (("black", 2.0), ("white", 0.9)):
        axes.add_patch(Rectangle(corner, wide, tall, fill=False, edgecolor=colour, linewidth=thickness, clip_on=False))
