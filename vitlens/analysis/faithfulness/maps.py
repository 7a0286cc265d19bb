"""Attribution maps before any check: their resolution, faults, centre of mass and similarity."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation import intervals
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps, Masks

AnyMaps = Float[Tensor, "_ _ _"]  # images, rows and columns of any size
PerImage = Float[Tensor, " batch"]
Size = tuple[int, int]  # height and width in px, or rows and columns of a grid
Explain = Callable[[Model, Images, Labels], Maps]  # a method: the maps of images for their targets

TOP: Final = 0.1  # share of the places that are the top
# the grid of a model without patches, as in the ViT presets
_SMALL_SIDE = 64  # px; images with a shorter side below this have _SMALL_GRID
_SMALL_GRID = 8  # cells per side
_LARGE_GRID = 14
# range, relative to the largest value, up to which a map counts as constant
_CONSTANT: Final = 1e-6
_SUM_ROUNDING: Final = 1e-12  # error of a sum of shares


def on_grid(maps: AnyMaps, grid: Size) -> AnyMaps:
    """Return one number per cell of the grid.

    Each axis is averaged where the map is finer, and interpolated linearly where it is coarser.
    """
    if tuple(maps.shape[-2:]) == grid:
        return maps
    large = enlarge_maps(maps, (max(maps.shape[-2], grid[0]), max(maps.shape[-1], grid[1])))
    return F.adaptive_avg_pool2d(large.unsqueeze(1), grid).squeeze(1)


def enlarge_maps(maps: AnyMaps, size: Size) -> AnyMaps:
    """Return maps interpolated bilinearly to (height, width) px.

    Maps of this size are returned unchanged.
    """
    if tuple(maps.shape[-2:]) == size:
        return maps
    large: Tensor = F.interpolate(
        maps.unsqueeze(1), size=size, mode="bilinear", align_corners=False
    )
    return large.squeeze(1)


def removal_grid(model: Model) -> Size:
    """Return the grid (rows, columns) of the cells that are removed: the patches of the model.

    For a model without patches they are those of a ViT of its size: 8x8 under 64 px, 14x14 above.
    """
    if model.anatomy.layout is not None:
        return model.anatomy.layout.grid
    is_small = min(model.input_size) < _SMALL_SIDE
    cells = _SMALL_GRID if is_small else _LARGE_GRID
    height, width = model.input_size
    return min(cells, height), min(cells, width)  # no cell is smaller than a pixel


@dataclass(frozen=True)
class MapFaults:
    """The maps that cannot be ranked.

    not_finite: True for maps with NaN or infinity.
    constant: True for other maps that are constant.
    """

    not_finite: Bool[Tensor, " batch"]
    constant: Bool[Tensor, " batch"]

    @property
    def sound(self) -> Bool[Tensor, " batch"]:
        """Return the maps that can be ranked."""
        return ~(self.not_finite | self.constant)

    @property
    def words(self) -> str:
        """Return the faults in words, such as "2 of 56 not finite, 1 of 56 constant"."""
        counts = {"not finite": int(self.not_finite.sum()), "constant": int(self.constant.sum())}
        maps = len(self.constant)
        return ", ".join(f"{count} of {maps} {kind}" for kind, count in counts.items() if count)


def map_faults(maps: AnyMaps) -> MapFaults:
    """Return the maps that are not finite, and those that are constant.

    A map is constant if its range is below a millionth of its largest value, or if it is all-zero.
    """
    flat = maps.detach().flatten(1).double()
    not_finite = ~flat.isfinite().all(1)
    constant = flat.amax(1) - flat.amin(1) <= _CONSTANT * flat.abs().amax(1)
    return MapFaults(not_finite=not_finite, constant=constant & ~not_finite)


def is_one_map(maps: AnyMaps) -> bool:
    """Return True if all of several maps are the same one up to rounding."""
    values = maps.detach().double()
    largest_difference = (values - values[:1]).abs().max()
    return len(maps) > 1 and bool(largest_difference <= _CONSTANT * values.abs().max())


def usable(maps: AnyMaps) -> Bool[Tensor, " batch"]:
    """Return True for maps that are finite, somewhere positive and not constant; on the CPU."""
    is_positive = maps.detach().flatten(1).amax(1) > 0
    return (map_faults(maps).sound & is_positive).cpu()


def spearman(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Return the rank correlation of two maps of each image, -1 to 1.

    The correlation is NaN where one of the maps is constant. Along each axis, maps are compared at
    the coarser resolution of the two. Ties have their mean rank.
    """
    return intervals.spearman(*_on_one_grid(first, second)).float()


def top_overlap(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Return the share of the top tenth of places that two maps of each image have in common.

    By chance it is a tenth. Of equal values at the threshold, the first in reading order are taken.
    """
    first, second = _on_one_grid(first, second)
    count = max(1, round(TOP * first.shape[1]))
    in_both = _is_top(first, count) & _is_top(second, count)
    return in_both.sum(1).float() / count


def _is_top(values: Float[Tensor, "batch places"], count: int) -> Bool[Tensor, "batch places"]:
    top = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, top, True)


def map_iou(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Return the intersection over union of the places above the mean of each map.

    NaN where there are none in either.
    """
    first, second = _on_one_grid(first, second)
    first_above = first > first.mean(1, keepdim=True)
    second_above = second > second.mean(1, keepdim=True)
    intersection = (first_above & second_above).sum(1).float()
    return intersection / (first_above | second_above).sum(1).float()


def _on_one_grid(
    first: AnyMaps, second: AnyMaps
) -> tuple[Float[Tensor, "batch places"], Float[Tensor, "batch places"]]:
    """Return the values of both maps at the coarser resolution along each axis."""
    grid = min(first.shape[1], second.shape[1]), min(first.shape[2], second.shape[2])
    return on_grid(first.float(), grid).flatten(1), on_grid(second.float(), grid).flatten(1)


@dataclass(frozen=True)
class MapShares:
    """The position and concentration of each of n maps; 0 for a map that is not usable.

    usable: True for usable maps, see `usable`.
    row, column: the centre of mass, as shares of the height and width.
    spread: the root of the mean squared distance from there, as a share of the shorter side.
    half: the smallest share of the cells that contains half of the map (0.5 for a uniform map).
    central: the share of the map on the middle quarter of the image (0.25 for a uniform map).
    inside: the share of the map on the object, None without masks.
    """

    usable: Bool[Tensor, " batch"]
    row: PerImage
    column: PerImage
    spread: PerImage
    half: PerImage
    central: PerImage
    inside: PerImage | None = None


@dataclass(frozen=True)
class MapOverlap:
    """The similarity of two maps of each image, on one grid; 0 where either is not usable.

    usable: True if both maps are usable.
    spearman: the rank correlation of the raw maps, -1 to 1.
    top: the share of the top tenth of one map that is in the top tenth of the other, 0 to 1.
    shared: the mass of their positive parts in the same cells, 0 to 1.
    """

    usable: Bool[Tensor, " batch"]
    spearman: PerImage
    top: PerImage
    shared: PerImage


def as_shares(maps: AnyMaps, *, size: Size, grid: Size) -> Maps:
    """Return maps on a grid of cells as positive shares that sum to 1.

    The positive part is interpolated bilinearly to the image, then averaged over each cell.
    Negative values are evidence against the target. All shares are 0 if no value is positive. A
    value that is not finite counts as 0; see `usable`.

    size: the height and width of the image in px, a multiple of the grid.
    """
    finite = maps.detach().cpu().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    positive = finite.clamp_min(0)[:, None]
    large = F.interpolate(positive, size=size, mode="bilinear", align_corners=False)
    cells = F.adaptive_avg_pool2d(large, grid)[:, 0]
    total = cells.sum((1, 2), keepdim=True)
    shares = cells / total.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(total > 0, shares, 0.0)


def _multiple(size: Size, grid: Size) -> Size:
    """Return the size, rounded up to a multiple of the grid."""
    cell_height = -(-size[0] // grid[0])  # rounded up
    cell_width = -(-size[1] // grid[1])
    return grid[0] * cell_height, grid[1] * cell_width


def map_shares(maps: AnyMaps, *, size: Size, grid: Size, masks: Masks | None = None) -> MapShares:
    """Return the position and concentration of n maps of images of this size (px), on a grid.

    masks: the masks of the objects, at any resolution, None where they are not known.
    """
    size = _multiple(size, grid)
    inside = None
    cells = as_shares(maps, size=size, grid=grid)
    is_usable = usable(maps)
    if masks is not None:
        pixels = (masks.shape[-2], masks.shape[-1])  # the resolution of the masks
        on_object = as_shares(maps, size=pixels, grid=pixels) * masks.cpu()
        inside = on_object.sum((1, 2)) * is_usable
    row_count, column_count = cells.shape[-2:]
    rows = (torch.arange(row_count, dtype=cells.dtype) + 0.5) / row_count
    columns = (torch.arange(column_count, dtype=cells.dtype) + 0.5) / column_count
    mass_of_rows = cells.sum(2)
    mass_of_columns = cells.sum(1)
    row = (mass_of_rows * rows).sum(1)
    column = (mass_of_columns * columns).sum(1)
    # the variances of the mass along both sides, px^2
    vertical = (mass_of_rows * (rows - row[:, None]).square()).sum(1) * size[0] ** 2
    horizontal = (mass_of_columns * (columns - column[:, None]).square()).sum(1) * size[1] ** 2
    spread = (vertical + horizontal).sqrt() / min(size)
    # b images, r rows, c columns
    central = torch.einsum(
        "brc,r,c->b", cells, _share_in_middle(row_count), _share_in_middle(column_count)
    )
    return MapShares(
        usable=is_usable,
        row=row * is_usable,
        column=column * is_usable,
        spread=spread * is_usable,
        half=_half(cells) * is_usable,
        central=central * is_usable,
        inside=inside,
    )


def _share_in_middle(count: int) -> Float[Tensor, " cells"]:
    """Return the share of each of several cells along an axis that lies in its middle half."""
    edges = torch.linspace(0, 1, count + 1, dtype=torch.float64).clamp(0.25, 0.75)
    return edges.diff() * count


def map_overlap(first: AnyMaps, second: AnyMaps, *, size: Size, grid: Size) -> MapOverlap:
    """Return the similarity of two models' maps of the same n images, of any resolution."""
    size = _multiple(size, grid)
    first_raw = first.detach().cpu().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    second_raw = second.detach().cpu().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    both_usable = usable(first) & usable(second)
    correlation = spearman(first_raw, second_raw).double().nan_to_num(0.0)
    first_shares = as_shares(first, size=size, grid=grid).flatten(1)
    second_shares = as_shares(second, size=size, grid=grid).flatten(1)
    return MapOverlap(
        both_usable,
        spearman=torch.where(both_usable, correlation, 0.0),
        top=top_overlap(first_raw, second_raw).double() * both_usable,
        shared=torch.minimum(first_shares, second_shares).sum(1) * both_usable,
    )


def _half(cells: Maps) -> PerImage:
    """Return the share of the cells, greatest first, that contain half of the mass.

    The last cell counts in part.
    """
    ordered = cells.flatten(1).sort(1, descending=True).values
    cumulative = ordered.cumsum(1)
    # the index of the cell that reaches half, which is the number of cells before it
    last = (cumulative < 0.5 - _SUM_ROUNDING).sum(1).clamp_max(ordered.shape[1] - 1)
    index_before_last = (last - 1).clamp_min(0)[:, None]
    mass_before_last = cumulative.gather(1, index_before_last)[:, 0]
    mass_before_last = torch.where(last > 0, mass_before_last, 0.0)
    mass_of_last = ordered.gather(1, last[:, None])[:, 0]
    missing = 0.5 - mass_before_last
    part = torch.where(mass_of_last > 0, missing / mass_of_last.clamp_min(1e-300), 0.0)
    return (last + part) / ordered.shape[1]
