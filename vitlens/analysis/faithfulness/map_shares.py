"""Maps as shares of their mass: which are usable, the position and concentration of their mass, overlap of two maps.

Maps of any resolution are resampled to one grid of cells: the positive part is interpolated bilinearly to the image,
then summed over each cell, as a share of the total. Negative values (evidence against the target) are left out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.faithfulness.agreement import spearman, top_overlap
from vitlens.analysis.faithfulness.resampled import on_grid
from vitlens.errors import InputError
from vitlens.shapes import Maps, Masks

PerImage = Float[Tensor, " batch"]
Size = tuple[int, int]


@dataclass(frozen=True)
class MapShares:
    """Position and concentration of each of n maps; 0 for a map that is not usable.

    usable: finite, somewhere positive, and not constant; row, column: of its centre of mass, shares of the height and
    width; spread: root of the mean squared distance from there, a share of the image's shorter side; half: the smallest
    share of the image's cells that contains half of the map (0.5 for a uniform map); central: share of the map on the
    middle quarter of the image (0.25 for a uniform map); inside: share on the object, None without masks.
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
    """The similarity of two maps of each image, on one grid; 0 where either is unusable.

    usable: whether both are; spearman: rank correlation of the raw maps, -1 to 1; top: share of the top tenth of one
    that is in the top tenth of the other, 0 to 1; shared: mass of their positive parts in the same cells, 0 to 1.
    """

    usable: Bool[Tensor, " batch"]
    spearman: PerImage
    top: PerImage
    shared: PerImage


def as_shares(maps: Float[Tensor, "batch _ _"], *, size: Size, grid: Size) -> Maps:
    """Maps of any resolution on a grid of cells: positive part, shares that sum to 1; all 0 where nothing is positive.

    size: px (height, width) to which maps are enlarged; grid: (rows, columns) that divide it. A value that is not
    finite counts as 0 here; see `usable`.
    """
    if size[0] % grid[0] or size[1] % grid[1]:
        raise InputError(f"expected a grid that divides images of {size[0]}x{size[1]} px, found {grid[0]}x{grid[1]}")
    positive = maps.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0).clamp_min(0)[:, None]
    large = F.interpolate(positive, size=size, mode="bilinear", align_corners=False)
    cells = F.adaptive_avg_pool2d(large, grid)[:, 0]
    whole = cells.sum((1, 2), keepdim=True)
    return torch.where(whole > 0, cells / whole.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def usable(maps: Float[Tensor, "batch _ _"]) -> Bool[Tensor, " batch"]:
    """Which maps are finite everywhere, somewhere positive, and not constant."""
    flat = maps.detach().cpu().double().flatten(1)
    finite = flat.isfinite().all(1)
    flat = flat.nan_to_num(0.0, 0.0, 0.0)
    greatest, least = flat.amax(1), flat.amin(1)
    return finite & (greatest > 0) & (greatest - least > 1e-6 * flat.abs().amax(1))


def map_shares(maps: Float[Tensor, "batch _ _"], *, size: Size, grid: Size, masks: Masks | None = None) -> MapShares:
    """Position and concentration of n maps, and the share of each on its object where masks are known."""
    cells = as_shares(maps, size=size, grid=grid)
    is_usable = usable(maps)
    row, column, spread = _place(cells, size)
    inside = None
    if masks is not None:
        pixels = (masks.shape[-2], masks.shape[-1])  # the resolution of the masks
        inside = (as_shares(maps, size=pixels, grid=pixels) * masks.cpu()).sum((1, 2)) * is_usable
    return MapShares(
        is_usable,
        row * is_usable,
        column * is_usable,
        spread * is_usable,
        _half(cells) * is_usable,
        _central(cells) * is_usable,
        inside,
    )


def map_overlap(
    first: Float[Tensor, "batch _ _"], second: Float[Tensor, "_ _ _"], *, size: Size, grid: Size
) -> MapOverlap:
    """The similarity of two models' maps of the same n images; each may have its own resolution."""
    if len(first) != len(second):
        raise InputError(f"expected maps of the same images, found {len(first)} and {len(second)}")
    both = usable(first) & usable(second)
    shares = [as_shares(maps, size=size, grid=grid).flatten(1) for maps in (first, second)]
    coarser = min(first.shape[1], second.shape[1]), min(first.shape[2], second.shape[2])
    raw = [on_grid(maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0), coarser) for maps in (first, second)]
    ranked = torch.where(both, spearman(*raw).double().nan_to_num(0.0), 0.0)
    return MapOverlap(both, ranked, top_overlap(*raw).double() * both, torch.minimum(*shares).sum(1) * both)


def _place(cells: Maps, size: Size) -> tuple[PerImage, PerImage, PerImage]:
    """Centre of mass (row, column) as shares of the sides, and the spread around it, a share of the shorter side."""
    rows, columns = ((torch.arange(count, dtype=cells.dtype) + 0.5) / count for count in cells.shape[-2:])
    row = (cells.sum(2) * rows).sum(1)
    column = (cells.sum(1) * columns).sum(1)
    down = (cells.sum(2) * (rows - row[:, None]).square()).sum(1) * size[0] ** 2
    across = (cells.sum(1) * (columns - column[:, None]).square()).sum(1) * size[1] ** 2
    return row, column, (down + across).sqrt() / min(size)


def _half(cells: Maps) -> PerImage:
    """The share of the cells, greatest first, that contain half of the mass; the last cell counts in part."""
    ordered = cells.flatten(1).sort(1, descending=True).values
    cumulative = ordered.cumsum(1)
    last = (cumulative < 0.5 - 1e-12).sum(1).clamp_max(ordered.shape[1] - 1)
    before = torch.where(last > 0, cumulative.gather(1, (last - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    step = ordered.gather(1, last[:, None])[:, 0]
    part = torch.where(step > 0, (0.5 - before) / step.clamp_min(1e-300), 0.0)
    return (last + part) / ordered.shape[1]


def _central(cells: Maps) -> PerImage:
    """The mass on the middle half of the height and of the width; cells on its edge count in part."""
    rows, columns = (_inside_middle(count) for count in cells.shape[-2:])
    return torch.einsum("brc,r,c->b", cells, rows, columns)


def _inside_middle(count: int) -> Float[Tensor, " count"]:
    """The share of each of count equal parts of [0, 1] that lies between 0.25 and 0.75."""
    edges = torch.linspace(0, 1, count + 1, dtype=torch.float64).clamp(0.25, 0.75)
    return edges.diff() * count


_CONSTANT = 1e-6  # range, relative to the largest value, up to which a map counts as constant


@dataclass(frozen=True)
class MapFaults:
    """Which images' maps cannot be ranked: not_finite, constant (batch,)."""

    not_finite: Bool[Tensor, " batch"]
    constant: Bool[Tensor, " batch"]

    @property
    def sound(self) -> Bool[Tensor, " batch"]:
        """The maps that can be ranked."""
        return ~(self.not_finite | self.constant)

    @property
    def words(self) -> str:
        """The faults in words, such as "2 of 56 not finite, 1 of 56 constant"; "" without faults."""
        total = len(self.constant)
        counts = {"not finite": int(self.not_finite.sum()), "constant": int(self.constant.sum())}
        faults = [f"{count} of {total} {kind}" for kind, count in counts.items() if count]
        return ", ".join(faults)


def map_faults(maps: Maps) -> MapFaults:
    """Which maps are not finite, and which are constant: with a range below a millionth of the largest value.

    An all-zero map is constant. A map that is not finite is not called constant.
    """
    flat = maps.flatten(1).double()
    broken = ~flat.isfinite().all(1)
    known = torch.where(broken[:, None], 0.0, flat)
    constant = known.amax(1) - known.amin(1) <= _CONSTANT * known.abs().amax(1)
    return MapFaults(broken, constant & ~broken)
