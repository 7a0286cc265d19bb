"""One photograph and the maps of several classes: what a model uses for each of the objects in it."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.crossed import cross_out
from vitlens.figures.inputs import Array, as_array, as_image, require_length
from vitlens.figures.overlay import enlarged, is_constant, upsample
from vitlens.figures.style import WIDE, styled

COLOURS: Final = "inferno"  # from dark, which stays grey, to bright: legible on photographs of any colour
_LARGEST: Final = 99.5  # percentile of a map from which it has the full colour
_MOST: Final = 4  # panels that are legible in a column of text
_GAP, _BELOW = 0.08, 0.06  # inch
_DIMMED: Final = 0.75  # of the grey image's brightness, where a map is 0


@styled
def class_maps(
    *, image: ArrayLike, maps: ArrayLike, classes: Sequence[str], probabilities: Sequence[float], title: str
) -> Figure:
    """A photograph (3, height, width) in [0, 1] beside the map of each class over it in grey.

    maps: (classes, rows, columns), not negative, each drawn as a share of its own largest values: the greater, the
    brighter and the less transparent; classes: one to three, above their maps with the probabilities (fractions) that
    the model gives them. A uniform map is crossed out. Raises InputError for other shapes and ranges.
    """
    picture = as_image(image)
    values = as_array(maps, name="maps", axes=("classes", "rows", "columns"))
    require_length(len(classes), len(values), name="classes", of="the maps")
    require_length(len(probabilities), len(values), name="probabilities", of="the maps")
    if len(values) >= _MOST:
        raise InputError(f"expected maps of at most {_MOST - 1} classes, found {len(values)}")
    if values.min() < -1e-6 * np.abs(values).max():
        raise InputError(f"expected maps without negative values, found {values.min():.3g}")
    across, ratio = 1 + len(values), picture.shape[1] / picture.shape[2]
    width = min((WIDE - 0.12 + _GAP) / across - _GAP, 2.6)
    drawn = board(
        title=title,
        count=across,
        across=across,
        panel=(width, width * ratio),
        gap=(_GAP, 0.0),
        margins=Margins(top=0.24, bottom=_BELOW),
    )
    first, *others = drawn.panels
    first.imshow(enlarged(picture), interpolation="lanczos")
    first.set_title("photograph")
    for axes, own, name, probability in zip(others, values, classes, probabilities, strict=True):
        axes.imshow(_glowing(picture, own), interpolation="lanczos")
        axes.set_title(f"{name} ({100 * probability:.0f} %)")
        if is_constant(own):
            cross_out(axes, "uniform")
    without_frames(drawn.panels)
    return drawn.figure


def _glowing(picture: Array, values: Array) -> Array:
    """The image in dimmed grey, with the map's colours as opaque as its values are great."""
    pixels = enlarged(picture)
    grey = _DIMMED * np.repeat((pixels @ np.array([0.2126, 0.7152, 0.0722]))[..., None], 3, axis=2)
    if is_constant(values):
        return grey
    raised = values - values.min()
    shares = upsample(np.clip(raised / np.percentile(raised, _LARGEST), 0, 1), (pixels.shape[0], pixels.shape[1]))
    colours = colormaps[COLOURS](0.35 + 0.6 * shares)[..., :3]
    weight = shares[..., None] ** 0.8
    return np.asarray((1 - 0.85 * weight) * grey + 0.85 * weight * colours)
