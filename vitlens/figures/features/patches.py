"""Features of patches: as colours over the image, and matched between two images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import PHOTOGRAPHS, Margins, board, without_frames
from vitlens.figures.inputs import as_array, as_images, require_length
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import MAGNITUDE, SMALL, WIDE, shortened, styled


@styled
def patch_colour_rows(*, images: ArrayLike, colours: Mapping[str, ArrayLike], title: str) -> Figure:
    """Images (n, 3, height, width) in [0, 1], each above the colours of its patches by every model.

    colours: by model, (n, rows, columns, 3) in [0, 1]; equal colours are equal features of that model; colours of
    different models are not comparable. Raises InputError where shapes do not fit.
    """
    pictures = as_images(images)
    if not colours:
        raise InputError("expected the colours of at least one model, found none")
    rows = {
        name: as_array(of_model, name=f"colours of {name}", axes=("batch", "rows", "columns", "3"))
        for name, of_model in colours.items()
    }
    for name, of_model in rows.items():
        require_length(len(of_model), len(pictures), name=f"sets of colours of {name}", of="the images")
        low, high = float(of_model.min()), float(of_model.max())
        if low < -1e-6 or high > 1 + 1e-6:
            raise InputError(f"expected colours of {name} in [0, 1], found {low:.3g} to {high:.3g}")
    across = len(pictures)
    ratio = pictures.shape[2] / pictures.shape[3]
    count = across * (1 + len(rows))
    side = 0.28
    panel = min((WIDE - side - 0.1) / across - 0.06, (PHOTOGRAPHS / (count * ratio)) ** 0.5, 1.5)
    drawn = board(
        title=title,
        count=count,
        across=across,
        panel=(panel, panel * ratio),
        gap=(0.06, 0.06),
        margins=Margins(left=side),
    )
    cells = np.array(drawn.panels, dtype=object).reshape(1 + len(rows), across)
    for axes, picture in zip(cells[0], pictures, strict=True):
        axes.imshow(enlarged(picture))
    for line, of_model in zip(cells[1:], rows.values(), strict=True):
        for axes, values in zip(line, of_model, strict=True):
            axes.imshow(np.clip(values, 0, 1), interpolation="nearest", aspect="auto")
    without_frames(drawn.panels)
    letters = int(panel * ratio / 0.065)
    for axes, name in zip(cells[:, 0], ("input", *rows), strict=True):
        axes.set_ylabel(shortened(name, max(letters, 8)), fontsize=SMALL)
    return drawn.figure


@dataclass(frozen=True)
class Matches:
    """The most similar patches of two images, in descending order: sources, targets (m, 2) rows and columns from 0;
    similarity (m,); grid: (rows, columns) of both images' patches."""

    sources: ArrayLike
    targets: ArrayLike
    similarity: ArrayLike
    grid: tuple[int, int]


@styled
def correspondence_lines(
    *,
    pairs: Sequence[tuple[ArrayLike, ArrayLike]],
    matches: Sequence[Matches],
    titles: Sequence[str],
    title: str,
    most: int = 15,
) -> Figure:
    """Pairs of images (3, height, width) side by side, with a line for each of the best matches of patches.

    most: lines per pair; their colour is the similarity (lighter: greater, over the range of all lines). Raises
    InputError where lengths do not fit.
    """
    require_length(len(matches), len(pairs), name="sets of matches", of="the pairs")
    require_length(len(titles), len(pairs), name="titles", of="the pairs")
    pictures = [tuple(as_images(np.asarray(_plain(image))[None])[0] for image in pair) for pair in pairs]
    similarities = [as_array(best.similarity, name="similarity", axes=("matches",))[:most] for best in matches]
    low = min(float(values.min()) for values in similarities)
    high = max(float(values.max()) for values in similarities)
    ratio = pictures[0][0].shape[1] / pictures[0][0].shape[2]
    panel = min((WIDE - 0.5) / 4 if len(pairs) > 1 else 2.6, 2.6)
    across = 4 if len(pairs) > 1 else 2
    drawn = board(
        title=f"{title}: similarity {low:.2f} (dark) to {high:.2f} (light)",
        count=2 * len(pairs),
        across=across,
        panel=(panel, panel * ratio),
        gap=(0.1, 0.28),
        margins=Margins(top=0.24),
    )
    for index, (pair, best, values) in enumerate(zip(pictures, matches, similarities, strict=True)):
        left, right = drawn.panels[2 * index : 2 * index + 2]
        for axes, picture in ((left, pair[0]), (right, pair[1])):
            axes.imshow(enlarged(picture), extent=(0, best.grid[1], best.grid[0], 0), aspect="auto")
        left.set_title(shortened(titles[index], int(2 * panel / 0.075)), loc="left")
        ends = [
            as_array(places, name="places", axes=("matches", "2"))[:most] + 0.5
            for places in (best.sources, best.targets)
        ]
        for source, target, value in zip(*ends, values, strict=True):
            colour = colormaps[MAGNITUDE]((value - low) / (high - low) if high > low else 1.0)
            line = ConnectionPatch(
                source[::-1],
                target[::-1],
                "data",
                "data",
                axesA=left,
                axesB=right,
                color=colour,
                linewidth=1.2,
                connectionstyle="arc3,rad=-0.12",  # straight lines in a row would overlap
            )
            right.add_artist(line)
            line.set_clip_on(False)
            left.plot(*source[::-1], "o", color=colour, markersize=2.4, markeredgecolor="black", markeredgewidth=0.3)
            right.plot(*target[::-1], "o", color=colour, markersize=2.4, markeredgecolor="black", markeredgewidth=0.3)
        for axes in (left, right):
            axes.set(xlim=(0, best.grid[1]), ylim=(best.grid[0], 0))
    without_frames(drawn.panels)
    return drawn.figure


def _plain(image: ArrayLike) -> ArrayLike:
    detach = getattr(image, "detach", None)  # a torch tensor, without importing torch
    return image if detach is None else np.asarray(detach().cpu().double())
