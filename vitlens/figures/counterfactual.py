"""Counterfactuals: the patches whose removal changes the prediction, by method."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import enlarged, upsample
from vitlens.figures.style import SMALL, TALL, WIDE, styled

_GREYING = 0.8  # share of grey in a removed patch


@styled
def counterfactual_panels(
    *,
    images: ArrayLike,
    removed: ArrayLike,
    titles: Sequence[str],
    names: Sequence[str],
    turned: Sequence[Sequence[str]],
    title: str,
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], each followed by its smallest sets of removed patches, in grey.

    removed: (batch, methods, rows, columns), true where a patch is removed; titles: the methods; names: the
    prediction of each image; turned: the prediction without the patches, for each panel. The caption of an empty set is
    "none found". Raises InputError when shapes do not fit.
    """
    pictures = as_images(images)
    sets = as_array(removed, name="removed", axes=("batch", "methods", "rows", "columns")) > 0.5
    count, methods = sets.shape[:2]
    require_length(count, len(pictures), name="sets of patches", of="the images")
    require_length(len(titles), methods, name="titles", of="the methods")
    require_length(len(names), count, name="names", of="the images")
    if [len(row) for row in turned] != [methods] * count:
        raise InputError(f"expected {methods} words for each of {count} images, found {[len(row) for row in turned]}")
    ratio = pictures.shape[2] / pictures.shape[3]
    gap = (0.07, 0.42)
    width = min((WIDE - 0.1) / (methods + 1) - gap[0], ((TALL - 0.7) / count - gap[1]) / ratio, 1.5)
    drawn = board(
        title=title,
        count=count * (methods + 1),
        across=methods + 1,
        panel=(width, width * ratio),
        gap=gap,
        margins=Margins(top=0.22, bottom=0.4),
    )
    for index, picture in enumerate(pictures):
        row = drawn.panels[index * (methods + 1) : (index + 1) * (methods + 1)]
        row[0].imshow(enlarged(picture))
        _caption(row[0], "input" if index == 0 else "", names[index])
        for method, axes in enumerate(row[1:]):
            axes.imshow(_greyed(picture, sets[index, method]))
            size = int(sets[index, method].sum())
            word = f"{size} of {sets[index, method].size}\n→ {turned[index][method]}" if size else "none found"
            _caption(axes, titles[method] if index == 0 else "", word)
    without_frames(drawn.panels)
    return drawn.figure


def _greyed(picture: Array, removed: NDArray[np.bool_]) -> Array:
    """A picture whose removed patches are grey."""
    large = np.asarray(enlarged(picture), dtype=np.float64)
    where = upsample(removed.astype(np.float64), large.shape[:2], smooth=False)[..., None] > 0.5
    greyed: Array = np.where(where, (1 - _GREYING) * large + _GREYING * 0.5, large)
    return greyed


def _caption(axes: Axes, above: str, below: str) -> None:
    axes.set_title(above, fontsize=SMALL)
    axes.set_xlabel(below, fontsize=SMALL, labelpad=2)
