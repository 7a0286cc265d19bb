"""Maps over their images as pixels, the scales of their colours, and what is drawn upon them.

The image under a map is drawn in grey, so that colours depend only on the map.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from vitlens.charts import style

Array = NDArray[np.floating[Any]]

_OPACITY: Final = 0.85  # of a map's largest values, in `overlaid`
_BLENDED: Final = 0.65  # opacity of a map in `blend`
LARGEST: Final = 99.5  # percentile from which values have the full colour
_ZERO: Final = 0.02  # share of the upper end of a scale below which its lower end becomes 0
_SHARPEST: Final = 224  # pixels to which a smaller image is enlarged before a map is drawn over it
_GREY: Final = np.array([0.2126, 0.7152, 0.0722])  # luminance of red, green, blue (Rec. 709)
_FEW: Final = 12  # number of values below which none counts as extreme
_FAR: Final = 3.0  # times the usual magnitude, from which on a value lies beyond the colours
POSITIVE: Final = ListedColormap(colormaps[style.SIGNED](np.linspace(0.5, 1, 256)), name="positive")
_PLATE: Final[dict[str, Any]] = {"facecolor": "white", "alpha": 0.85, "linewidth": 0.0, "pad": 1.5}


@dataclass(frozen=True)
class Scale:
    """The range of values of the colours.

    low, high: its ends, equal if all values are equal.
    clipped: True if some values lie beyond.
    """

    low: float
    high: float
    clipped: bool = False

    @property
    def norm(self) -> Normalize:
        """Return the normalization of values to [0, 1]; a constant map gets the middle."""
        if self.high > self.low:
            return Normalize(self.low, self.high, clip=True)
        room = abs(self.low) / 2 or 0.5  # not 0
        return Normalize(self.low - room, self.low + room, clip=True)


def is_constant(values: Array) -> bool:
    """Return True if all values are equal up to rounding."""
    return bool(np.ptp(values) <= 1e-6 * np.abs(values).max())


def flaw_of(values: Array) -> str:
    """Return why a map says nothing, "" for a map without a flaw."""
    if not np.isfinite(values).all():
        return "not finite"
    return "uniform" if is_constant(values) else ""


def joint_scale(maps: Array) -> Scale:
    """Return one scale for all maps, from 0 to 0 if no value is finite.

    It begins at the least value, or at 0 if that is near, and ends at the 99.5th percentile.
    Without the percentile a few attention sinks would leave the rest dark.
    """
    values = maps[np.isfinite(maps)]
    if not values.size:
        return Scale(0.0, 0.0)
    low = float(values.min())
    high = float(values.max())
    if is_constant(values):
        return Scale(low, low)
    most = float(np.percentile(values, LARGEST))
    if 0 < low < _ZERO * most:
        low = 0.0
    if low < most < high:
        return Scale(low, most, clipped=True)
    return Scale(low, high)


def symmetric_scale(values: Array, *, least: float = 0.0) -> Scale:
    """Return a scale symmetric around 0, up to the greatest absolute value or `least`."""
    magnitudes = np.abs(values[np.isfinite(values)])
    most = max(float(magnitudes.max(initial=0.0)), least)
    return Scale(0.0 - most, most)  # -most would be -0 for 0


def clipped_scale(values: Array, *, least: float = 0.0) -> Scale:
    """Return a symmetric scale up to the greatest absolute value, or clipped if that is extreme.

    A clipped scale ends at the 98th percentile, or at the second greatest value; the arrows of its
    bar show it. The greatest value is extreme if it is more than three times that end.
    """
    scale = symmetric_scale(values, least=least)
    magnitudes = np.sort(np.abs(values[np.isfinite(values)]))
    if len(magnitudes) < _FEW:
        return scale
    index = min(len(magnitudes) - 2, int(0.98 * len(magnitudes)))
    end = max(least, float(magnitudes[index]))
    if 0 < _FAR * end < scale.high:
        return Scale(0.0 - end, end, clipped=True)
    return scale


def upsample(values: Array, size: tuple[int, int], *, smooth: bool = True) -> Array:
    """Return a map (rows, columns) at an image's (height, width).

    The interpolation is bilinear, or that of the nearest cell if not `smooth`. It equals torch's
    interpolate with align_corners=False and is constant beyond the outermost centres.
    """
    rows, columns = values.shape
    vertical = _mixing(size[0], rows, smooth)
    horizontal = _mixing(size[1], columns, smooth)
    return np.asarray(vertical @ values @ horizontal.T)


def _mixing(target: int, source: int, smooth: bool) -> Array:
    """Return the matrix (target, source) that resamples one axis."""
    # the middle of each target cell, in cells of the source
    middles = (np.arange(target) + 0.5) * source / target
    if smooth:
        positions = np.clip(middles - 0.5, 0, source - 1)  # among the middles of the source's cells
    else:
        positions = np.floor(middles)
    # linear weights of the two nearest cells; a whole position has one cell with weight 1
    return np.maximum(0.0, 1.0 - np.abs(positions[:, None] - np.arange(source)))


def enlarged(image: Array) -> Array:
    """Return an image (3, height, width) as (height, width, 3), with repeated pixels.

    It is enlarged to at least 224 px.
    """
    times = max(1, ceil(_SHARPEST / min(image.shape[1:])))
    return np.asarray(image.transpose(1, 2, 0).repeat(times, axis=0).repeat(times, axis=1))


def blend(image: Array, values: Array, *, scale: Scale, smooth: bool = True) -> Array:
    """Return the pixels (height, width, 3) in [0, 1] of a map over a grey image.

    The image is enlarged. It has no map over it if the map is uniform or not finite.

    image: (3, height, width).
    values: the map (rows, columns).
    """
    grey = enlarged(image) @ _GREY
    if flaw_of(values):
        return np.repeat(grey[..., None], 3, axis=2)
    shares = scale.norm(upsample(values, grey.shape, smooth=smooth))
    colours = colormaps[style.MAGNITUDE](shares)[..., :3]
    return np.asarray((1 - _BLENDED) * grey[..., None] + _BLENDED * colours)


def overlaid(image: Array, values: Array, *, signed: bool) -> Array:
    """Return pixels as `blend` does, of a map as a share of its largest values.

    Values above 0 are red, values below 0 are blue. Greater values are less transparent. Methods
    have different units: only places can be compared. A map without signs begins at its least
    value.
    """
    grey = np.repeat((enlarged(image) @ _GREY)[..., None], 3, axis=2)
    if flaw_of(values):
        return grey
    if not signed:
        values = values - values.min()
    magnitudes = np.abs(values)
    most = float(np.percentile(magnitudes, LARGEST))
    if most == 0:  # almost all values are 0
        most = float(magnitudes.max())
    shares = upsample(np.clip(values / most, -1, 1), (grey.shape[0], grey.shape[1]))
    colours = colormaps[style.SIGNED](0.5 + shares / 2)[..., :3]
    weight = _OPACITY * np.abs(shares)[..., None]
    return np.asarray((1 - weight) * grey + weight * colours)


def as_colormap(colours: str | Colormap) -> Colormap:
    """Return the map of colours of a name."""
    if isinstance(colours, str):
        return colormaps[colours]
    return colours


def colour_bar(
    axes: Axes,
    *,
    scale: Scale,
    label: str,
    colours: str | Colormap = style.MAGNITUDE,
    both: bool = False,
) -> None:
    """Fill axes with the colour bar of a scale, with ticks at round numbers.

    If values lie above the scale (Scale.clipped), its end is an arrow, and a tick there has "≥".

    both: True if values also lie below.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    extend = "neither"
    if scale.clipped:
        extend = "both" if both else "max"
    bar = figure.colorbar(
        ScalarMappable(scale.norm, colours), cax=axes, extend=extend, extendfrac=0.04
    )
    bar.set_label(label)
    bar.outline.set_visible(False)
    if scale.low == scale.high:
        bar.set_ticks([scale.low], labels=[f"{scale.low:.3g}\nall\nequal"])
        return
    ticks = style.round_ticks(scale.low, scale.high)
    labels = style.tick_words(ticks)
    if scale.clipped and ticks[-1] == scale.high:
        labels[-1] = f"≥ {labels[-1]}"
    if scale.clipped and both and ticks[0] == scale.low:
        labels[0] = f"≤ {labels[0]}"
    bar.set_ticks(ticks, labels=labels)


def no_value(axes: Axes) -> None:
    """Hatch axes, under a map whose cells without a value are transparent."""
    axes.add_patch(
        Rectangle(
            (0, 0),
            1,
            1,
            hatch="//////",
            facecolor="#E0E0E0",
            edgecolor="#A8A8A8",
            linewidth=0,
            transform=axes.transAxes,
            zorder=-1,
        )
    )


def cross_out(axes: Axes, reason: str) -> None:
    """Draw two diagonals over a panel with an image, and the reason in its middle."""
    for ends in ((0.0, 1.0), (1.0, 0.0)):
        (line,) = axes.plot(
            (0.02, 0.98), [0.02 + 0.96 * end for end in ends], transform=axes.transAxes
        )
        line.set(color=style.VERMILLION, linewidth=1.1, solid_capstyle="butt", gid="crossed out")
        line.set_path_effects([withStroke(linewidth=2.0, foreground="white")])
    middle: dict[str, Any] = {"ha": "center", "va": "center", "transform": axes.transAxes}
    axes.text(0.5, 0.5, reason, fontsize=style.SMALL, bbox=_PLATE, zorder=5, **middle)


def mark_peak(axes: Axes, values: Array, *, hit: bool) -> None:
    """Mark the highest point of the map that is drawn, by colour and symbol as a hit or a miss."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    y, x = np.unravel_index(upsample(values, (height, width)).argmax(), (height, width))
    colour = style.WRONG
    marker = "X"
    if hit:
        colour = style.RIGHT
        marker = "o"
    axes.plot(
        x,
        y,
        marker,
        color=colour,
        markeredgecolor="white",
        markersize=6,
        markeredgewidth=0.9,
        clip_on=False,
    )
    axes.xaxis.label.set_color(colour)


def outline(axes: Axes, mask: Array) -> None:
    """Draw the border of a mask (height, width) in white over black, visible on any background."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    edge = np.pad(upsample(mask, (height, width), smooth=False), 1)
    ys = np.arange(-1, height + 1)
    xs = np.arange(-1, width + 1)
    for colour, thickness in (("black", 1.8), ("white", 0.9)):
        axes.contour(xs, ys, edge, levels=[0.5], colors=colour, linewidths=thickness)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
