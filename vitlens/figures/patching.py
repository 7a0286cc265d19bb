"""Activation patching: the share restored when activations of one run replace those of another."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import Board, Margins, board, without_frames
from vitlens.figures.gaps import as_measured
from vitlens.figures.inputs import Array, as_array, as_image, require_length
from vitlens.figures.overlay import enlarged
from vitlens.figures.signed import (
    BESIDE,
    draw_signed,
    name_heads,
    number_places,
    signed_bar,
    symmetric_scale,
)
from vitlens.figures.style import (
    LABEL,
    WIDE,
    shortened,
    styled,
    wrapped_title,
)

_TITLE: Final = 0.2  # inch above a panel for its title
_SECTION: Final = 0.4  # inch above the grids of patches for their heading and the layer of each
_AXIS: Final = 0.42  # inch below a map for its numbers and label
_GRID: Final = (0.09, 0.24)  # inch between grids of patches, across and down
_CELL: Final = 0.2  # inch, the height of a row of prefix tokens


@styled
def patching_maps(
    *,
    clean: ArrayLike,
    corrupted: ArrayLike,
    title: str,
    heads: ArrayLike | None = None,
    positions: Iterable[ArrayLike] | None = None,
    prefix: Mapping[str, ArrayLike] | None = None,
    names: tuple[str, str] = ("clean", "corrupted"),
    unit: str = "share of the logit difference restored",
) -> Figure:
    """The share restored when an activation of the clean run replaces that of the corrupted run.

    clean, corrupted: images (3, height, width) in [0, 1]; names: their titles; heads: (layers, heads), NaN where there
    is no such head; positions: for each layer (rows, columns), its patches, or one array (layers, rows, columns);
    prefix: by name ("CLS"), (layers,), the tokens before the patches, only with positions. All are in the unit, which
    the title names: with the default 0 is the corrupted run and 1 the clean one. Colours are symmetric around 0, up to
    the greatest absolute value, for heads, positions and prefix each. Layers and heads count from 0. Raises InputError
    when shapes do not fit, for infinite numbers, and where there are neither heads nor positions.
    """
    pictures = [as_image(clean, name="clean"), as_image(corrupted, name="corrupted")]
    values = None if heads is None else as_measured(heads, name="heads", axes=("layers", "heads"))
    layers = () if positions is None else positions
    grids = [as_array(layer, name="positions", axes=("rows", "columns")) for layer in layers]
    tokens = {name: as_array(by_layer, name=name, axes=("layers",)) for name, by_layer in (prefix or {}).items()}
    if values is None and not grids:
        raise InputError("expected heads or positions, found neither")
    for name, by_layer in tokens.items():
        require_length(len(by_layer), len(grids), name=f"layers of {name}", of="the layers of positions")
    picture, panel = _sizes(pictures, values)
    whole = f"{title}; colours: {unit}"
    drawn = _board(whole, grids, _TITLE + max(picture[1], panel[1] + _AXIS), len(tokens))
    top = wrapped_title(whole, WIDE)[1] + _TITLE
    _draw_pictures(drawn, pictures, names, (top, *picture))
    if values is not None:
        _draw_heads(drawn, values, (2 * picture[0] + 0.85, top, *panel))
    if grids:
        _draw_grids(drawn, grids)
    if tokens:
        _draw_tokens(drawn, tokens)
    return drawn.figure


def _sizes(pictures: Sequence[Array], heads: Array | None) -> tuple[tuple[float, float], tuple[float, float]]:
    """Width and height in inches of each image and of the map of heads, which is 0 without heads; side by side they
    take the width of the page."""
    ratio = max(picture.shape[1] / picture.shape[2] for picture in pictures)
    if heads is None:
        wide = min(1.5, 2.4 / ratio)
        return (wide, wide * ratio), (0.0, 0.0)
    layers, count = heads.shape
    across = min(max(0.4 * count, 0.8), WIDE - 2 * 1.5 - 0.95 - BESIDE)
    wide = min((WIDE - across - 0.95 - BESIDE) / 2, 2.4 / ratio)
    across = min(WIDE - 2 * wide - 0.95 - BESIDE, 0.8 * count)  # what tall images leave
    return (wide, wide * ratio), (across, max(wide * ratio, 1.2, 0.1 * layers))


def _board(title: str, grids: Sequence[Array], top: float, tokens: int) -> Board:
    """A board as wide as a page with a panel per grid, room above for images and heads, and below for prefix tokens."""
    if not grids:
        margins = Margins(left=0.0, right=0.0, bottom=top)
        return board(title=title, count=0, across=1, panel=(WIDE, 0.0), gap=(0.0, 0.0), margins=margins)
    across = -(-len(grids) // -(-len(grids) // 8))
    ratio = max(grid.shape[0] / grid.shape[1] for grid in grids)
    wide = min((WIDE - 0.1 - BESIDE) / across - _GRID[0], 1.2)
    block = across * (wide + _GRID[0]) - _GRID[0]
    below = _CELL * tokens + _TITLE + _AXIS if tokens else max(0.1, 1.3 - wide * ratio)
    margins = Margins(left=0.1, right=WIDE - 0.1 - block, top=top + 0.15 + _SECTION, bottom=below)
    return board(title=title, count=len(grids), across=across, panel=(wide, wide * ratio), gap=_GRID, margins=margins)


def _draw_pictures(
    drawn: Board, pictures: Sequence[Array], names: Sequence[str], place: tuple[float, float, float]
) -> None:
    """Draw both images side by side; place: top, width and height in inches."""
    top, wide, tall = place
    for index, (picture, name) in enumerate(zip(pictures, names, strict=True)):
        axes = drawn.place(0.1 + index * (wide + 0.1), top, wide, tall)
        axes.imshow(enlarged(picture))
        axes.set_anchor("N")
        axes.set_title(shortened(name, int(wide / 0.068)))
        without_frames([axes])


def _draw_heads(drawn: Board, values: Array, place: tuple[float, float, float, float]) -> None:
    left, top, wide, tall = place
    axes, scale = drawn.place(*place), symmetric_scale([values])
    draw_signed(axes, values, scale)
    axes.set_title("heads patched")
    name_heads(axes, values.shape)
    signed_bar(drawn.place(left + wide + 0.08, top, 0.09, tall), scale, "")


def _draw_grids(drawn: Board, grids: Sequence[Array]) -> None:
    """Draw every layer's patches with one scale."""
    scale = symmetric_scale(grids)
    for index, (axes, grid) in enumerate(zip(drawn.panels, grids, strict=True)):
        draw_signed(axes, grid, scale)
        axes.set_aspect("equal")
        axes.set_title(str(index) if index else "layer 0")
        axes.set(xticks=[], yticks=[])
    long = float(np.clip(drawn.bottom - drawn.top, 1.2, 3.0))
    signed_bar(drawn.place(drawn.right + 0.08, drawn.top, 0.09, long), scale, "")
    figure = drawn.figure
    place = (0.1 / figure.get_figwidth(), 1 - (drawn.top - _SECTION) / figure.get_figheight())
    figure.text(*place, "tokens patched, by position in the image", va="top", fontsize=LABEL)


def _draw_tokens(drawn: Board, tokens: Mapping[str, Array]) -> None:
    """Draw the prefix tokens as a map (tokens, layers) with its own scale, and write its values."""
    values = np.stack(list(tokens.values()))
    left = 0.2 + 0.064 * max(len(shortened(name)) for name in tokens)
    wide = min(0.34 * values.shape[1], WIDE - 0.1 - left)
    axes, scale = drawn.place(left, drawn.bottom + _TITLE, wide, _CELL * len(tokens)), symmetric_scale([values])
    draw_signed(axes, values, scale)
    decimals = int(np.clip(2 - np.ceil(np.log10(max(scale.high, 1.0))), 0, 2))
    for (row, column), value in np.ndenumerate(np.round(values, decimals) + 0.0):
        word = f"{value:.{decimals}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{decimals}f}"
        dark = abs(value) > 0.6 * scale.high > 0
        axes.text(column, row, word, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    axes.set_yticks(range(len(tokens)), [shortened(name) for name in tokens])
    number_places(axes.xaxis, values.shape[1], wide / 0.2)
    axes.set_xlabel("layer")
