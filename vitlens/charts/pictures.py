"""Charts of images: photographs in rows and columns, with maps over them or without."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import overlay, style
from vitlens.charts.panels import BAR_ROOM, Margins, area, without_frames
from vitlens.charts.values import Draw
from vitlens.report.numbers import percent

_LARGEST: Final = 1.35  # inch of a picture
_LEAST: Final = (0.2, 0.62)  # of a map alone, and of an image
_GAP: Final = 0.06
_LETTER: Final = 0.065  # inch per letter below a picture
_ROUND: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256)
_TALL: Final = 6.0  # of all rows
_LINES: Final = 6  # of images with many maps each, on a page
_DARK: Final = 0.25  # share of a scale up to which all colours are dark
_NAME: Final = 14  # letters of a line of a name
_MOSAIC: Final = 8  # most maps in a row or column


@dataclass(frozen=True)
class Picture:
    """A cell of `images`. image (3, height, width) in [0, 1]; map (rows, columns) that is drawn over it, or alone; row,
    column: their names; below: a line under it; frame: the colour around it; mask (height, width): of an object,
    outlined; hit: whether the map's highest point, which is marked, lies on it; crossed: why the map says nothing,
    crossed out; sheet: the number of its figure, where there are several; signed: None, or whether a map that is drawn
    as a share of its largest value has signs; of: what the title of its figure names.
    """

    image: NDArray[np.floating] | None
    map: NDArray[np.floating] | None = None
    row: str = ""
    column: str = ""
    below: str = ""
    frame: str = ""
    mask: NDArray[np.bool_] | None = None
    hit: bool | None = None
    crossed: str = ""
    sheet: int = 0
    signed: bool | None = None
    of: str = ""

    @classmethod
    def predicted(
        cls,
        image: NDArray[np.floating],
        prediction: str,
        probability: float | None,
        label: str | None,
        *,
        row: str = "",
    ) -> "Picture":
        """Return an image with its prediction below, marked by colour and symbol as right or wrong, where a label is
        known."""
        words = style.shortened(prediction, 16)
        if probability is not None:
            words += f", {percent(probability)}"
        words = words if len(words) <= 16 else words.replace(", ", "\n", 1)
        if label is None:
            return cls(image, below=words, row=row)
        if prediction == label:
            return cls(image, below=f"{style.RIGHT_SYMBOL} {words}", frame=style.RIGHT, row=row)
        return cls(
            image, below=f"{style.WRONG_SYMBOL} {words}\nis {style.shortened(label, 16)}", frame=style.WRONG, row=row
        )

    @property
    def flaw(self) -> str:
        """Return why its map says nothing, where that is so."""
        if self.crossed or self.map is None or self.map.size == 1:
            return self.crossed
        values = np.asarray(self.map, float)
        return overlay.flaw_of(values if self.image is not None else values[np.isfinite(values)])


def images(
    *,
    scale: Literal["own", "joint", "signed"] = "own",
    label: str = "",
    smooth: bool = True,
    largest: float = _LARGEST,
    under: bool = False,
) -> Draw:
    """Pictures by row and column, columns that do not fit in further blocks below. scale: each map from 0 to its own
    maximum, or all on one, symmetric around 0 if signed; label: of the bar, which is drawn for one scale, and with
    a label also for maps up to their own maximum; largest: side of a picture, inch,
    where there is room; under: names of rows are below them."""

    @style.styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        places, down, across = _places(rows)
        bar = _scale(rows, scale)
        legend = bar
        if bar is None and label:
            legend = (overlay.Scale(0.0, 1.0), style.MAGNITUDE, "")
        names = {places[id(each)][0]: each.row for each in rows if each.row}
        common = bar[0] if bar and scale == "joint" else None
        beside = {} if under else {at: _name_lines(style.shortened(name, 40)) for at, name in names.items()}
        dark = _dark(rows, "row", common)
        for at in beside:
            if names[at] in dark:
                beside[at] += f"\nup to {dark[names[at]]:.2g}"
        longest = max((len(line) for text in beside.values() for line in text.split("\n")), default=0)
        left = 0.12 + 0.075 * longest if longest else _GAP
        right = BAR_ROOM if legend else _GAP
        room = style.full_width() - left - right
        least = _LEAST[sum(each.image is not None for each in rows) > 1]
        blocks = -(-across // max(1, int((room + _GAP) / (least + _GAP))))
        across = -(-across // blocks)
        ratio = max(_shape(each)[0] / _shape(each)[1] for each in rows)
        most = max(_LARGEST, min(largest, _TALL / down))
        side = min((room + _GAP) / across - _GAP, most / max(1.0, ratio), (style.TALL - 1) / (blocks * down * ratio))
        letters = max(10, int((side + _GAP) / _LETTER))
        below = {id(each): _wrapped(each.below, letters) for each in rows}
        text = 0.05 + 0.14 * max(_lines(each) for each in below.values()) + 0.16 * under
        letters_above = max(8, int(side / 0.07))
        heads = {each.column: textwrap.fill(style.shortened(each.column, 60), letters_above) for each in rows}
        for column_name, value in _dark(rows, "column", common).items():
            heads[column_name] += f"\nup to {value:.2g}"
        above = 0.1 + 0.14 * max(map(_lines, heads.values())) if any(heads) else 0.05
        block = above + down * (side * ratio + text)
        margins = Margins(left=left, right=right, top=0.0, bottom=0.1)
        wide = across * (side + _GAP) - _GAP
        drawn = area(title=title, wide=wide, tall=blocks * block - (0.0 if under else 0.05), margins=margins)
        for each in rows:
            row, (part, column) = places[id(each)][0], divmod(places[id(each)][1], across)
            y = drawn.top + part * block + above + row * (side * ratio + text)
            axes = drawn.place(drawn.left + column * (side + _GAP), y, side, side * ratio)
            _fill(axes, each, bar, smooth)
            if each.below:
                axes.set_xlabel(below[id(each)], fontsize=style.SMALL, labelpad=2)
            if row == 0 and each.column:
                axes.set_title(heads[each.column])
        figure = drawn.figure
        size = drawn.figure.get_size_inches()
        for part, (row, name) in product(range(blocks), names.items()):
            y = drawn.top + part * block + above + row * (side * ratio + text)
            if under:
                words = style.shortened(name, int(wide / _LETTER))
                down_to = 1 - (y + side * ratio + 0.04) / size[1]
                figure.text(drawn.left / size[0], down_to, words, va="top", fontsize=style.SMALL)
            else:
                middle = 1 - (y + side * ratio / 2) / size[1]
                figure.text((drawn.left - 0.05) / size[0], middle, beside[row], ha="right", va="center")
        if legend:
            of_scale, colours, words = legend
            both = colours == style.SIGNED
            overlay.colour_bar(drawn.bar(), scale=of_scale, label=label or words, colours=colours, both=both)
        return drawn.figure

    return draw


def _places(rows: Sequence[Picture]) -> tuple[dict[int, tuple[int, int]], int, int]:
    """Return the row and column of each picture, by its id, and how many there are."""
    down = list(dict.fromkeys(each.row for each in rows))
    across = list(dict.fromkeys(each.column for each in rows))
    if len(down) == 1 and len(across) == 1:  # pictures without places
        lines = -(-len(rows) // 6)
        columns = -(-len(rows) // lines)
        return {id(each): divmod(at, columns) for at, each in enumerate(rows)}, lines, columns
    if across == [""]:  # the pictures of a row beside one another
        places = {}
        before = dict.fromkeys(down, 0)
        for each in rows:
            places[id(each)] = down.index(each.row), before[each.row]
            before[each.row] += 1
        return places, len(down), max(before.values())
    return {id(each): (down.index(each.row), across.index(each.column)) for each in rows}, len(down), len(across)


def _scale(rows: Sequence[Picture], kind: str) -> tuple[overlay.Scale, str | Colormap, str] | None:
    """Return what the colours of all maps mean: their scale, the map of colours, and the label of their bar."""
    signs = [each.signed for each in rows if each.signed is not None]
    if any(signs):
        return overlay.Scale(-1.0, 1.0, clipped=True), style.SIGNED, "share of its maximum"
    if signs:
        return overlay.Scale(0.0, 1.0, clipped=True), overlay.POSITIVE, "share of its maximum"
    maps = [np.ravel(each.map) for each in rows if each.map is not None]  # their grids may differ
    if not maps or kind == "own":
        return None
    every = np.concatenate(maps)
    return (
        (overlay.clipped_scale(every), style.SIGNED, "")
        if kind == "signed"
        else (overlay.joint_scale(every), style.MAGNITUDE, "")
    )


def _dark(rows: Sequence[Picture], side: Literal["row", "column"], scale: overlay.Scale | None) -> dict[str, float]:
    """Return the largest value of each named row or column whose maps are all dark on the scale of all maps."""
    if scale is None or scale.low < 0:
        return {}
    largest: dict[str, float] = {}
    for each in rows:
        name = getattr(each, side)
        if each.map is not None and name:
            most = float(np.nanmax(each.map))
            largest[name] = max(most, largest.get(name, most))
    limit = scale.low + _DARK * (scale.high - scale.low)
    return {name: most for name, most in largest.items() if most <= limit}


def _shape(each: Picture) -> tuple[int, int]:
    shown = each.image if each.image is not None else each.map
    return (1, 1) if shown is None else (shown.shape[-2], shown.shape[-1])


def _lines(text: str) -> int:
    return text.count("\n") + 1 if text else 0


def _name_lines(name: str) -> str:
    """Divide a name into lines at its spaces, underscores, dashes and dots, never within a word."""
    lines = [""]
    for part in re.findall(r"[^\s_.-]*[\s_.-]+|[^\s_.-]+", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, letters: int) -> str:
    """Lines that are too long divided, but not between a number and its % sign."""
    lines = [textwrap.fill(line.replace(" %", "\u00a0%"), letters) for line in style.drawable(text).split("\n")]
    return "\n".join(lines)


def _fill(axes: Axes, each: Picture, bar: tuple[overlay.Scale, str | Colormap, str] | None, smooth: bool) -> None:
    """One picture with its map and what is drawn upon it."""
    without_frames([axes])
    if each.image is None and each.map is not None:
        colours = overlay.as_colormap(bar[1] if bar else style.MAGNITUDE).with_extremes(bad="#D9D9D9")
        axes.imshow(each.map, cmap=colours, norm=(bar[0] if bar else _own(each.map)).norm)
    else:
        axes.imshow(_pixels(each, bar[0] if bar else None, smooth), interpolation="nearest")
    if each.flaw:
        overlay.cross_out(axes, each.flaw)
    if each.mask is not None:
        overlay.outline(axes, np.asarray(each.mask, float))
    if each.map is not None and each.hit is not None:
        overlay.mark_peak(axes, np.asarray(each.map, float), hit=each.hit)
    if each.frame:
        axes.spines[:].set(visible=True, color=each.frame, linewidth=2.0)


def _own(values: overlay.Array) -> overlay.Scale:
    known = values[np.isfinite(values)]
    return overlay.Scale(min(0.0, float(known.min(initial=0.0))), float(known.max(initial=0.0)) or 1.0)


def _pixels(each: Picture, joint: overlay.Scale | None, smooth: bool) -> overlay.Array:
    if each.image is None:
        if each.map is None:
            return np.ones((1, 1, 3))
        return np.asarray(colormaps[style.MAGNITUDE](_own(each.map).norm(each.map)))[..., :3]
    if each.map is None:
        return overlay.enlarged(np.asarray(each.image, float))
    values = np.asarray(each.map, float)
    if each.signed is not None:
        return overlay.overlaid(each.image, values, signed=each.signed)
    return overlay.blend(each.image, values, scale=joint or _own(values), smooth=smooth)


def pixels(picture: Picture) -> NDArray[np.uint8]:
    """Return a picture alone, (height, width, 3), with its object outlined in white, for a page of panels one by
    one."""
    from scipy.ndimage import binary_erosion

    drawn = _pixels(picture, None, True)
    if picture.mask is not None:
        times = drawn.shape[0] // picture.mask.shape[0]
        inside = np.asarray(picture.mask, bool).repeat(times, 0).repeat(times, 1)
        drawn[inside & ~binary_erosion(inside, iterations=2)] = 1.0
    return np.asarray(np.round(np.clip(drawn, 0, 1) * 255), np.uint8)


def amplification(changes: NDArray[np.floating]) -> int:
    """Return the greatest round factor at which every perturbation, drawn around mid-grey, stays within the range of
    colours; at least 1."""
    largest = float(np.abs(changes).max(initial=0.0))
    fitting = [factor for factor in _ROUND if factor * largest <= 0.5 * 1.001] if largest > 0 else []
    return max(fitting, default=1)


def images_on_a_page(panels: int) -> int:
    """Return the number of images that fit on a page when each has this many maps beside it; at least one."""
    return max(1, _LINES // -(-(panels + 1) // 8))


def with_maps(
    pictures: overlay.Array,
    maps: Sequence[overlay.Array],
    titles: Sequence[str],
    names: Sequence[str] = ("",),
    *,
    patches: Sequence[tuple[int, int]] = (),
) -> Iterator[Picture]:
    """Yield each image (3, height, width) beside its maps (batch, rows, columns), one a title; patches: (row, column)
    of the one that is outlined in each map, the first's also in the image."""
    for index, (name, image) in enumerate(zip(names, pictures)):
        masks: list[NDArray[np.bool_] | None] = [None] * len(maps)
        if patches:
            masks = [patch_mask(patch, own.shape[1:], image.shape[1:]) for patch, own in zip(patches, maps)]
        yield Picture(image, row=name, column="image", mask=masks[0])
        for title, own, mask in zip(titles, maps, masks, strict=True):
            yield Picture(image, own[index], name, title, mask=mask)


def patch_mask(patch: tuple[int, int], grid: tuple[int, ...], size: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return one patch (row, column) as a mask of the image, to be outlined."""
    one = np.zeros(grid)
    one[patch] = 1.0
    return np.asarray(overlay.upsample(one, (size[0], size[1]), smooth=False) > 0.5)


def of_heads(maps: overlay.Array, numbers: Sequence[int], image: overlay.Array | None = None) -> Iterator[Picture]:
    """Yield the map of every head (layers, heads, rows, columns), layers down, or across where they are more than twice
    as many; numbers: of the layers; image: beside them."""
    across = len(maps) > 2 * maps.shape[1]
    layers = [f"{number}" if at else f"layer {number}" for at, number in enumerate(numbers)]
    heads = [f"{head}" if head else "head 0" for head in range(maps.shape[1])]
    if image is not None:
        yield Picture(image, row=heads[0] if across else layers[0], column="image")
    for first, second in np.ndindex((len(heads), len(layers)) if across else (len(layers), len(heads))):
        layer, head = (second, first) if across else (first, second)
        row, column = (heads[head], layers[layer]) if across else (layers[layer], heads[head])
        yield Picture(None, maps[layer, head], row, column)


def mosaic(similarity: overlay.Array, grid: tuple[int, int]) -> overlay.Array:
    """Similarities (patches, patches) as one map: for each of at most 8 by 8 patches, at its place, its similarity with
    all others; NaN between two, and that with itself, which is 1, as the greatest of two different."""
    different = similarity[~np.eye(len(similarity), dtype=bool)]
    values = np.minimum(similarity, different.max(initial=-1.0) if different.size else 1.0)
    steps = [-(-length // _MOSAIC) for length in grid]
    kept = [range((length - 1) % step // 2, length, step) for length, step in zip(grid, steps)]  # spaced, centred
    maps = values.reshape(*grid, *grid)[np.ix_(*kept)]  # (down, across, rows, columns)
    gap = max(1, round(max(grid) / 12))
    padded = np.pad(maps, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    down, across, rows, columns = padded.shape
    return np.asarray(padded.transpose(0, 2, 1, 3).reshape(down * rows, across * columns)[:-gap, :-gap])


def cut(image: overlay.Array, patch: tuple[int, int]) -> overlay.Array:
    """Return an image, each pixel repeated, with white lines between its patches of (height, width) px."""
    times = max(1, -(-448 // min(image.shape[1:])))
    drawn = image.repeat(times, axis=1).repeat(times, axis=2)
    for axis, side in ((1, patch[0]), (2, patch[1])):
        edges = np.arange(side * times, drawn.shape[axis], side * times)
        np.moveaxis(drawn, axis, 0)[(edges[:, None] + np.arange(-2, 2)).ravel()] = 1.0
    return np.asarray(drawn)
