"""What attribution maps are before any check: their resolution, their faults, where their mass
lies, how two agree.
"""

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
Size = tuple[int, int]
Explain = Callable[[Model, Images, Labels], Maps]  # a method

TOP: Final = 0.1  # share of the places that are the top
# cells per side for images under 64 px and above, as in the ViT presets
_SMALL = 64
_FEW = 8
_MANY = 14
# range, relative to the largest value, up to which a map counts as constant
_CONSTANT: Final = 1e-6


def on_grid(maps: AnyMaps, grid: Size) -> AnyMaps:
    """Return one number per cell of the grid: each axis averaged where the map is finer, bilinear
    where coarser.
    """
    if tuple(maps.shape[-2:]) == grid:
        return maps
    large = enlarged(maps, (max(maps.shape[-2], grid[0]), max(maps.shape[-1], grid[1])))
    return F.adaptive_avg_pool2d(large.unsqueeze(1), grid).squeeze(1)


def enlarged(maps: AnyMaps, size: Size) -> AnyMaps:
    """Return maps interpolated bilinearly to (height, width) px; a map of this size is returned
    unchanged.
    """
    if tuple(maps.shape[-2:]) == size:
        return maps
    large: Tensor = F.interpolate(
        maps.unsqueeze(1), size=size, mode="bilinear", align_corners=False
    )
    return large.squeeze(1)


def removal_grid(model: Model) -> Size:
    """Return the cells (rows, columns) that are removed from an image: the model's patches, or for
    a model without patches those of a ViT of its size (8x8 under 64 px, 14x14 above).
    """
    if model.anatomy.layout is not None:
        return model.anatomy.layout.grid
    side = _FEW if min(model.input_size) < _SMALL else _MANY
    return min(side, model.input_size[0]), min(side, model.input_size[1])


@dataclass(frozen=True)
class MapFaults:
    """Which images' maps cannot be ranked: not_finite; constant, among the others (batch,)."""

    not_finite: Bool[Tensor, " batch"]
    constant: Bool[Tensor, " batch"]

    @property
    def sound(self) -> Bool[Tensor, " batch"]:
        """Return the maps that can be ranked."""
        return ~(self.not_finite | self.constant)

    @property
    def words(self) -> str:
        """Return the faults in words, such as "2 of 56 not finite, 1 of 56 constant"; "" without
        faults.
        """
        counts = {"not finite": int(self.not_finite.sum()), "constant": int(self.constant.sum())}
        return ", ".join(
            f"{count} of {len(self.constant)} {kind}" for kind, count in counts.items() if count
        )


def map_faults(maps: AnyMaps) -> MapFaults:
    """Return which maps are not finite, and which are constant: all-zero, or with a range below a
    millionth of the largest value.
    """
    flat = maps.detach().flatten(1).double()
    broken = ~flat.isfinite().all(1)
    constant = flat.amax(1) - flat.amin(1) <= _CONSTANT * flat.abs().amax(1)
    return MapFaults(broken, constant & ~broken)


def usable(maps: AnyMaps) -> Bool[Tensor, " batch"]:
    """Return which maps are finite everywhere, somewhere positive, and not constant; on the CPU."""
    return (map_faults(maps).sound & (maps.detach().flatten(1).amax(1) > 0)).cpu()


def spearman(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Return the rank correlation of two maps of each image, -1 to 1; NaN where one of them is
    constant.

    Maps of different resolutions are compared at the coarser one along each axis. Ties have their
    mean rank.
    """
    return intervals.spearman(*_on_one_grid(first, second)).float()


def top_overlap(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Return the share of the top tenth of the places of one map that are among those of the other;
    chance is a tenth.

    Of equal values at the threshold, the first in reading order are taken.
    """
    flat = _on_one_grid(first, second)
    count = max(1, round(TOP * flat[0].shape[1]))
    tops = [maps.argsort(dim=1, descending=True, stable=True)[:, :count] for maps in flat]
    marked, other = (
        torch.zeros_like(flat[0], dtype=torch.bool).scatter_(1, top, True) for top in tops
    )
    return (marked & other).sum(1).float() / count


def map_iou(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Intersection over union of the places above each map's own mean; NaN where there are none in
    either.
    """
    above, other = (maps > maps.mean(1, keepdim=True) for maps in _on_one_grid(first, second))
    return (above & other).sum(1).float() / (above | other).sum(1).float()


def _on_one_grid(first: AnyMaps, second: AnyMaps) -> list[Float[Tensor, "batch places"]]:
    grid = min(first.shape[1], second.shape[1]), min(first.shape[2], second.shape[2])
    return [on_grid(maps.float(), grid).flatten(1) for maps in (first, second)]


@dataclass(frozen=True)
class MapShares:
    """Position and concentration of each of n maps; 0 for a map that is not usable."""

    usable: Bool[Tensor, " batch"]
    row: PerImage  # of its centre of mass, shares of the height and width
    column: PerImage
    # root of the mean squared distance from there, a share of the image's shorter side
    spread: PerImage
    # the smallest share of the image's cells that contains half of the map (0.5 for a uniform map)
    half: PerImage
    central: (
        PerImage  # share of the map on the middle quarter of the image (0.25 for a uniform map)
    )
    inside: PerImage | None = None  # share on the object, None without masks


@dataclass(frozen=True)
class MapOverlap:
    """The similarity of two maps of each image, on one grid; 0 where either is unusable."""

    usable: Bool[Tensor, " batch"]  # whether both are
    spearman: PerImage  # rank correlation of the raw maps, -1 to 1
    top: PerImage  # share of the top tenth of one that is in the top tenth of the other, 0 to 1
    shared: PerImage  # mass of their positive parts in the same cells, 0 to 1


def as_shares(maps: AnyMaps, *, size: Size, grid: Size) -> Maps:
    """Return maps on a grid of cells: positive shares that sum to 1, all 0 where nothing is
    positive.

    The positive part is interpolated bilinearly to the image, then averaged over each cell.
    Negative values are evidence against the target. size: of the image, px (height, width), a
    multiple of the grid (rows, columns). A value that is not finite counts as 0; see `usable`.
    """
    positive = maps.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0).clamp_min(0)[:, None]
    large = F.interpolate(positive, size=size, mode="bilinear", align_corners=False)
    cells = F.adaptive_avg_pool2d(large, grid)[:, 0]
    whole = cells.sum((1, 2), keepdim=True)
    return torch.where(whole > 0, cells / whole.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def _multiple(size: Size, grid: Size) -> Size:
    """Return the size, rounded up to whole cells."""
    return grid[0] * -(-size[0] // grid[0]), grid[1] * -(-size[1] // grid[1])


def map_shares(maps: AnyMaps, *, size: Size, grid: Size, masks: Masks | None = None) -> MapShares:
    """Position and concentration of n maps of images of this size (px) on a grid of cells, and the
    share of each on its object where masks are known.
    """
    size = _multiple(size, grid)
    inside = None
    cells = as_shares(maps, size=size, grid=grid)
    known = usable(maps)
    if masks is not None:
        pixels = (masks.shape[-2], masks.shape[-1])  # the resolution of the masks
        inside = (as_shares(maps, size=pixels, grid=pixels) * masks.cpu()).sum((1, 2)) * known
    rows, columns = (
        (torch.arange(count, dtype=cells.dtype) + 0.5) / count for count in cells.shape[-2:]
    )
    row = (cells.sum(2) * rows).sum(1)
    column = (cells.sum(1) * columns).sum(1)
    down = (cells.sum(2) * (rows - row[:, None]).square()).sum(1) * size[0] ** 2
    across = (cells.sum(1) * (columns - column[:, None]).square()).sum(1) * size[1] ** 2
    spread = (down + across).sqrt() / min(size)
    edges = (
        torch.linspace(0, 1, count + 1, dtype=torch.float64).clamp(0.25, 0.75)
        for count in cells.shape[-2:]
    )
    middle = [
        own.diff() * (len(own) - 1) for own in edges
    ]  # of each row and column, the share in the middle half
    central = torch.einsum("brc,r,c->b", cells, *middle)
    numbers = {
        "row": row,
        "column": column,
        "spread": spread,
        "half": _half(cells),
        "central": central,
    }
    return MapShares(known, inside=inside, **{name: each * known for name, each in numbers.items()})


def map_overlap(first: AnyMaps, second: AnyMaps, *, size: Size, grid: Size) -> MapOverlap:
    """Return the similarity of two models' maps of the same n images; each may have its own
    resolution.
    """
    raw = [maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0) for maps in (first, second)]
    ranked = spearman(*raw).double()
    both = usable(first) & usable(second)
    shares = [
        as_shares(maps, size=_multiple(size, grid), grid=grid).flatten(1)
        for maps in (first, second)
    ]
    ranked = torch.where(both, ranked.nan_to_num(0.0), 0.0)
    return MapOverlap(
        both, ranked, top_overlap(*raw).double() * both, torch.minimum(*shares).sum(1) * both
    )


def _half(cells: Maps) -> PerImage:
    """Return the share of the cells, greatest first, that contain half of the mass; the last cell
    counts in part.
    """
    ordered = cells.flatten(1).sort(1, descending=True).values
    cumulative = ordered.cumsum(1)
    last = (cumulative < 0.5 - 1e-12).sum(1).clamp_max(ordered.shape[1] - 1)
    before = torch.where(
        last > 0, cumulative.gather(1, (last - 1).clamp_min(0)[:, None])[:, 0], 0.0
    )
    step = ordered.gather(1, last[:, None])[:, 0]
    part = torch.where(step > 0, (0.5 - before) / step.clamp_min(1e-300), 0.0)
    return (last + part) / ordered.shape[1]
