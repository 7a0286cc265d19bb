"""Whether maps follow small changes of the image: shifts of a part of a pixel and of one, and a flip.

The map of the changed image is compared with the map of the image, changed in the same way: for a method that follows
the change exactly the two are equal, also where a shift interpolates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.agreement import spearman
from vitlens.analysis.faithfulness.map_shares import map_faults
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.analysis.faithfulness.resampled import AnyMaps
from vitlens.analysis.faithfulness.steadiness import DISTURBANCES, FAR, Disturbance, SteadyState, judged_steadiness
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import Estimate, bootstrap_mean, wilson

Stack = Float[Tensor, "batch channels height width"]


@dataclass(frozen=True)
class Stability:
    """The maps under every disturbance. correlation: Spearman's, of the map of the changed image with the map that is
    changed in the same way (disturbances, batch), NaN where either is constant or not finite; jumped: whether the top
    point lies further than FAR from its place, False where the correlation is NaN."""

    disturbances: tuple[Disturbance, ...]
    correlation: Float[Tensor, "disturbances batch"]
    jumped: Bool[Tensor, "disturbances batch"]

    @property
    def usable(self) -> Bool[Tensor, " batch"]:
        """The images whose maps are usable under every disturbance."""
        return ~self.correlation.isnan().any(0)

    def correlations(self, *, seed: int = 0) -> list[Estimate]:
        """The mean rank correlation under each disturbance, with its interval; none without a usable map."""
        values = self.correlation[:, self.usable]
        return estimates(values, seed=seed, unit="") if values.shape[1] else []

    def jumps(self) -> list[Estimate]:
        """The share of images whose top point jumps under each disturbance (Wilson's interval)."""
        values = self.jumped[:, self.usable]
        return [wilson(int(row.sum()), len(row)) for row in values] if values.shape[1] else []

    def overall(self, *, seed: int = 0) -> tuple[Estimate | None, Estimate | None]:
        """The mean correlation over the judged disturbances, and the share of images whose top point jumps under any of
        them; None without a usable map."""
        judged = torch.tensor([disturbance.judged for disturbance in self.disturbances])
        correlation, jumped = self.correlation[judged][:, self.usable], self.jumped[judged][:, self.usable]
        if not correlation.numel():
            return None, None
        mean = bootstrap_mean(correlation.mean(0).numpy(), seed=seed, unit="")
        return mean, wilson(int(jumped.any(0).sum()), jumped.shape[1])

    def state(self, *, seed: int = 0) -> SteadyState:
        """Whether the maps jump."""
        return judged_steadiness(*self.overall(seed=seed))


def stability(
    model: Model,
    images: Images,
    targets: Labels,
    explain: Explain,
    *,
    maps: AnyMaps | None = None,
    disturbances: Sequence[Disturbance] = tuple(DISTURBANCES.values()),
) -> Stability:
    """The maps of a method under each disturbance of the images, for the same targets.

    maps: those of the images, where they are known. A map that is constant or not finite is not compared. Raises
    InputError for a method that gives maps of another size for a disturbed image.
    """
    with evaluating(model):
        known = explain(model, images, targets).cpu() if maps is None else maps.cpu()
        rows = []
        for disturbance in disturbances:
            found = explain(model, disturbed(images, disturbance), targets).cpu()
            if found.shape != known.shape:
                raise InputError(f"expected maps of shape {tuple(known.shape)}, found {tuple(found.shape)}")
            size = (int(images.shape[-2]), int(images.shape[-1]))
            rows.append(_compared(_moved(known, disturbance, size), found))
    return Stability(tuple(disturbances), *(torch.stack(each) for each in zip(*rows)))


def disturbed(images: Images, disturbance: Disturbance) -> Images:
    """The images shifted right and down by bilinear interpolation, their edges repeated, or flipped."""
    moved = shifted(images, disturbance.shift, disturbance.shift)
    return moved.flip(-1) if disturbance.flip else moved


def shifted(values: Stack, down: float, right: float) -> Stack:
    """Values moved by numbers of pixels that need not be whole: linear between the pixels, the edge repeated."""
    for axis, amount in ((-2, down), (-1, right)):
        if not amount:
            continue
        places = torch.arange(values.shape[axis], dtype=torch.float64) - amount
        low = places.floor()
        share = (places - low).to(values)
        shape = [1] * values.dim()
        shape[axis] = -1
        most = values.shape[axis] - 1
        below, above = (
            values.index_select(axis, (low + step).long().clamp(0, most).to(values.device)) for step in (0, 1)
        )
        values = below + share.view(shape) * (above - below)
    return values


def _moved(maps: AnyMaps, disturbance: Disturbance, size: tuple[int, int]) -> AnyMaps:
    """Maps changed as their images are: shifted by the same part of the sides."""
    down, right = (disturbance.shift * cells / side for cells, side in zip(maps.shape[-2:], size))
    moved = shifted(maps.float().unsqueeze(1), down, right).squeeze(1)
    return moved.flip(-1) if disturbance.flip else moved


def _compared(expected: AnyMaps, found: AnyMaps) -> tuple[Float[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """The rank correlation of two maps of each image, and whether the top point jumps."""
    sound = map_faults(expected).sound & map_faults(found).sound
    first, second = (torch.where(sound[:, None, None], maps.float(), 0.0) for maps in (expected, found))
    correlation = spearman(first, second).masked_fill(~sound, torch.nan)
    away = (_top(first) - _top(second)).abs().amax(1)
    return correlation, (away > FAR) & ~correlation.isnan()


def _top(maps: AnyMaps) -> Float[Tensor, "batch 2"]:
    """The row and column of each map's greatest value, as shares of the sides."""
    rows, columns = maps.shape[-2:]
    place = maps.flatten(1).argmax(1)
    return torch.stack((place // columns / rows, place % columns / columns), 1)
