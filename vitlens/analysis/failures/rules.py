"""The rules of the categories of failures: for each image whether each rule holds, and whether that is known.

Maps are compared with objects on a grid of cells, the patches. A cell belongs to the object if any of its pixels does.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.errors import Comparison
from vitlens.analysis.failures.taxonomy import QUARTER, SURE
from vitlens.analysis.faithfulness.map_shares import as_shares, usable
from vitlens.analysis.faithfulness.resampled import AnyMaps
from vitlens.shapes import Labels, Logits, Masks

Flags = Bool[Tensor, " batch"]
CellShares = Float[Tensor, "batch cells"]
CellFlags = Bool[Tensor, "batch cells"]
Cells = tuple[int, int]

_OTHERS = 20  # images of other classes from which on logits are correlated
_CORRELATED = 5000  # images over which logits are correlated, at most
_TENTH = 0.01  # share of the classes that count as look-alikes of one, at least one


@dataclass(frozen=True)
class Applied:
    """For n images whether a rule holds, and for which of them that is known."""

    holds: Flags
    known: Flags


@dataclass(frozen=True)
class MapCells:
    """n maps on the cells of a grid: shares of the positive mass, the object's cells, and which images have both a
    usable map and an object with background around it."""

    grid: Cells
    shares: CellShares
    objects: CellFlags
    known: Flags

    @property
    def peak_on_object(self) -> Flags:
        """Whether the cell of the highest value belongs to the object; of several such cells all must."""
        highest = self.shares == self.shares.amax(1, keepdim=True)
        return ~(highest & ~self.objects).any(1)

    def pick(self, rows: Tensor) -> "MapCells":
        """The maps of these images alone."""
        return MapCells(self.grid, self.shares[rows], self.objects[rows], self.known[rows])


def map_cells(maps: AnyMaps, masks: Masks, *, grid: Cells) -> MapCells:
    """Maps of any resolution and masks (n, height, width) of the same images on one grid."""
    size = grid[0] * -(-masks.shape[-2] // grid[0]), grid[1] * -(-masks.shape[-1] // grid[1])
    shares = as_shares(maps, size=size, grid=grid).flatten(1)
    objects = cells_of(masks, grid)
    known = usable(maps) & objects.any(1) & ~objects.all(1)
    return MapCells(grid, shares, objects, known)


def cells_of(masks: Masks, grid: Cells) -> CellFlags:
    """The cells of which any pixel is in the mask."""
    return F.adaptive_max_pool2d(masks.float().unsqueeze(1), grid).flatten(1) > 0


def elsewhere(cells: MapCells) -> Applied:
    """The map's highest cell is off the object."""
    return Applied(cells.known & ~cells.peak_on_object, cells.known)


def wrong_part(cells: MapCells) -> Applied:
    """The highest cell is on the object, and few of the object's cells hold half of the map's mass there."""
    on_object = cells.known & cells.peak_on_object
    held = torch.where(cells.objects, cells.shares, 0.0)
    covered = half_of(held).sum(1) / cells.objects.sum(1).clamp_min(1)
    return Applied(lowest(covered, on_object), cells.known)


def on_distractors(shares: CellShares, changed: CellFlags, objects: CellFlags, known: Flags) -> Applied:
    """The cells that hold distractors and no object have a larger share of the map than of the cells.

    changed: the cells that differ from the same scene drawn without distractors.
    """
    distractors = changed & ~objects
    over = (shares * distractors).sum(1) > distractors.double().mean(1)
    return Applied(known & over, known & distractors.any(1))


def small(masks: Masks) -> Applied:
    """The object's area is at or below the lower quartile of the images that have one."""
    areas = masks.flatten(1).double().mean(1)
    return Applied(lowest(areas, areas > 0), areas > 0)


def cut(masks: Masks) -> Applied:
    """The object reaches the edge of the image."""
    edge = masks[:, 0].any(1) | masks[:, -1].any(1) | masks[:, :, 0].any(1) | masks[:, :, -1].any(1)
    return Applied(edge, masks.flatten(1).any(1))


def look_alike(logits: Logits, labels: Labels) -> Applied:
    """The most probable class other than the label is among those that resemble the label most.

    Two classes resemble each other if their logits are correlated over the images of classes other than the label, so
    that an image's own logits do not count. Resembling: 1 % of the classes, at least one.
    """
    classes = logits.shape[1]
    holds, known = torch.zeros(len(labels), dtype=torch.bool), torch.zeros(len(labels), dtype=torch.bool)
    if classes < 3:
        return Applied(holds, known)
    rivals = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:_CORRELATED]
    for label in labels.unique().tolist():
        others = drawn[labels[drawn] != label]
        if len(others) < _OTHERS:
            continue
        likeness = _correlations(logits[others].double(), label)
        nearest = likeness.topk(max(1, round(_TENTH * classes))).indices
        members = labels == label
        holds[members] = torch.isin(rivals[members], nearest)
        known[members] = True
    return Applied(holds, known)


def doubtful(comparison: Comparison) -> Applied:
    """Both models predict the same other class with high probability."""
    first, second = comparison.first, comparison.second
    alike = (first.prediction == second.prediction) & ~first.correct
    sure = torch.minimum(first.confidence, second.confidence) >= SURE
    return Applied(alike & sure, torch.ones_like(alike))


def half_of(values: CellShares) -> CellFlags:
    """The fewest cells that hold half of each row's sum, the greatest first; none where the sum is 0."""
    ordered, order = values.sort(dim=1, descending=True, stable=True)
    whole = ordered.sum(1, keepdim=True)
    before = ordered.cumsum(1) - ordered
    taken = (before < 0.5 * whole - 1e-12) & (whole > 0)
    return torch.zeros_like(taken).scatter(1, order, taken)


def lowest(values: Float[Tensor, " batch"], known: Flags) -> Flags:
    """The images at or below the lower quartile of the known values; none where all are equal."""
    if not known.any():
        return torch.zeros_like(known)
    own = values[known].double()
    edge = torch.quantile(own, QUARTER)
    if float(own.max()) <= float(edge):
        return torch.zeros_like(known)
    return known & (values <= edge)


def spread(own: Applied, indices: Tensor, count: int) -> Applied:
    """A rule applied to the images at these indices alone, among count images: not known for the others."""
    holds, known = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    holds[indices], known[indices] = own.holds, own.known
    return Applied(holds, known)


def _correlations(logits: Float[Tensor, "others classes"], label: int) -> Float[Tensor, " classes"]:
    """The correlation of each class's logits with the label's; -1 for the label itself."""
    centred = logits - logits.mean(0)
    scale = centred.square().sum(0).sqrt().clamp_min(1e-12)
    values = (centred * centred[:, label, None]).sum(0) / (scale * scale[label])
    values[label] = -1.0
    return values
