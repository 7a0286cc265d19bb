"""Maps over their images, with a colour scale that several panels may share.

The image under a map is drawn in grey, so that colours depend only on the map.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, as_image
from vitlens.figures.style import MAGNITUDE, round_ticks, tick_words

OPACITY = 0.65  # share of the map's colour in an overlay
_ZERO = 0.02  # of the upper end of a scale, below which its lower end is 0
_SHARPEST = 224  # pixels to which a smaller image is enlarged before a map is drawn over it


@dataclass(frozen=True)
class Scale:
    """The range of values of the colours, shared by panels that are to be compared.

    low, high: in the maps' unit, equal where all maps are constant; clipped: some values lie above high.
    """

    low: float
    high: float
    clipped: bool = False

    @property
    def norm(self) -> Normalize:
        """Values to [0, 1] for a colour map; a constant map gets the middle, without a division by zero."""
        if self.high > self.low:
            return Normalize(self.low, self.high, clip=True)
        room = abs(self.low) / 2 or 0.5
        return Normalize(self.low - room, self.low + room, clip=True)


def is_constant(values: Array) -> bool:
    """Whether all values are equal up to rounding."""
    return bool(np.ptp(values) <= 1e-6 * np.abs(values).max())


def joint_scale(maps: ArrayLike) -> Scale:
    """One scale for all maps (batch, rows, columns): from the least value to the 99.5th percentile; from 0 where the
    least value is hardly above it.

    Otherwise a few attention sinks would leave the rest dark. Values above have the last colour (Scale.clipped).
    """
    values = as_array(maps, name="maps", axes=("batch", "rows", "columns"))
    low, high = float(values.min()), float(values.max())
    if is_constant(values):
        return Scale(low, low)
    most = float(np.percentile(values, 99.5))
    low = 0.0 if 0 < low < _ZERO * most else low
    return Scale(low, most, clipped=True) if low < most < high else Scale(low, high)


def upsample(values: ArrayLike, size: tuple[int, int], *, smooth: bool = True) -> Array:
    """A map (rows, columns) at an image's (height, width): bilinear between the centres of the patches, or nearest.

    Equal to torch's interpolate with align_corners=False; constant beyond the outermost centres.
    """
    grid = as_array(values, name="map", axes=("rows", "columns"))
    vertical, horizontal = (_mixing(target, source, smooth) for target, source in zip(size, grid.shape, strict=True))
    return np.asarray(vertical @ grid @ horizontal.T)


def _mixing(target: int, source: int, smooth: bool) -> Array:
    """Matrix (target, source) that resamples one axis."""
    position = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    if not smooth:
        position = np.floor((np.arange(target) + 0.5) * source / target)
    return np.maximum(0.0, 1.0 - np.abs(position[:, None] - np.arange(source)))


def blend(image: ArrayLike, values: ArrayLike, *, scale: Scale, opacity: float = OPACITY, smooth: bool = True) -> Array:
    """Pixels (height, width, 3) in [0, 1] of a map (rows, columns) over an image (3, height, width) in grey.

    An image under 224 px is first enlarged by an integer factor. Raises InputError when opacity is not in [0, 1].
    """
    if not 0 <= opacity <= 1:
        raise InputError(f"expected opacity in [0, 1], found {opacity}")
    pixels = enlarged(as_image(image))
    grey = pixels @ np.array([0.2126, 0.7152, 0.0722])
    colours = colormaps[MAGNITUDE](scale.norm(upsample(values, grey.shape, smooth=smooth)))[..., :3]
    return np.asarray((1 - opacity) * grey[..., None] + opacity * colours)


def enlarged(image: Array) -> Array:
    """An image (3, height, width) as (height, width, 3), each pixel repeated until the shorter side is at least 224."""
    times = max(1, -(-_SHARPEST // min(image.shape[1:])))
    return np.asarray(image.transpose(1, 2, 0).repeat(times, axis=0).repeat(times, axis=1))


def draw_map(axes: Axes, values: Array, *, scale: Scale) -> None:
    """Fill axes with a map (rows, columns), one coloured cell per patch."""
    axes.imshow(values, cmap=MAGNITUDE, norm=scale.norm, interpolation="nearest", aspect="auto")


def colour_bar(
    axes: Axes,
    *,
    scale: Scale,
    label: str,
    colours: str = MAGNITUDE,
    both: bool = False,
    place: Literal["vertical", "horizontal"] = "vertical",
) -> None:
    """Fill axes with the colour bar of a scale, with ticks at round numbers.

    An arrow at its end, and "≥" where a tick is there, say that values lie above (Scale.clipped); both: also below.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    extend = ("both" if both else "max") if scale.clipped else "neither"
    shown = ScalarMappable(scale.norm, colours)
    bar = figure.colorbar(shown, cax=axes, extend=extend, extendfrac=0.04, orientation=place)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if scale.low == scale.high:
        bar.set_ticks([scale.low], labels=[f"{scale.low:.3g}\nall\nequal"])
        return
    ticks = round_ticks(scale.low, scale.high)
    labels = tick_words(ticks)
    if scale.clipped and ticks[-1] == scale.high:
        labels[-1] = f"≥ {labels[-1]}"
    if scale.clipped and both and ticks[0] == scale.low:
        labels[0] = f"≤ {labels[0]}"
    bar.set_ticks(ticks, labels=labels)


def with_common_decimals(values: Sequence[float]) -> list[str]:
    """Numbers with the same number of decimals, the fewest that give the largest two or three digits."""
    largest = max(abs(value) for value in values)
    decimals = int(np.clip((2 if largest >= 1 else 1) - np.floor(np.log10(largest)), 0, 4)) if largest else 0
    return [f"{value:.{decimals}f}" for value in values]
