"""Whether maps follow small changes of the image: shifts of a part of a pixel and of one, and a flip.

The map of the changed image is compared with the map of the image, changed in the same way: for a method that follows
the change exactly the two are equal, also where a shift interpolates.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.checks import DISTURBANCES, FAR, Disturbance, Judgement, judged_stability
from vitlens.analysis.faithfulness.maps import AnyMaps, Explain, map_faults, spearman
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import Estimate, bootstrap_mean, wilson

OVERALL = "shifts"  # all shifts together
_JUDGED = [not disturbance.flip for disturbance in DISTURBANCES.values()]


@dataclass(frozen=True)
class Stability:
    """The maps under every disturbance. correlation: Spearman's, of the map of the changed image with the map that is
    changed in the same way (disturbances, batch), NaN where either is constant or not finite; jumped: whether the top
    point lies further than FAR from its place, False where the correlation is NaN."""

    correlation: Float[Tensor, "disturbances batch"]
    jumped: Bool[Tensor, "disturbances batch"]

    def rows(self, *, seed: int = 0) -> list[tuple[str, Estimate | None, Estimate | None]]:
        """The mean correlation, and the share of images whose top point jumps: over all shifts (under any of them),
        then under each disturbance, on the images whose maps are usable under all; without any, the first with None."""
        usable = ~self.correlation.isnan().any(0)
        correlation, jumped = self.correlation[:, usable], self.jumped[:, usable]
        if not usable.any():
            return [(OVERALL, None, None)]
        n = int(usable.sum())
        mean = bootstrap_mean(correlation[_JUDGED].mean(0).numpy(), seed=seed, unit="")
        each = zip(DISTURBANCES, estimates(correlation, seed=seed, unit=""), jumped.sum(1).tolist())
        return [
            (OVERALL, mean, wilson(int(jumped[_JUDGED].any(0).sum()), n)),
            *((name, own, wilson(count, n)) for name, own, count in each),
        ]

    def judged(self, *, seed: int = 0) -> Judgement:
        """Whether the maps jump."""
        return judged_stability(*self.rows(seed=seed)[0][1:])


def stability(
    model: Model, images: Images, targets: Labels, explain: Explain, *, maps: AnyMaps | None = None
) -> Stability:
    """The maps of a method under each disturbance of the images, for the same targets.

    maps: those of the images, where they are known. A map that is constant or not finite is not compared. Raises
    InputError for a method that gives maps of another size for a disturbed image.
    """
    correlations, jumps, (height, width) = [], [], images.shape[-2:]
    with evaluating(model):
        known = explain(model, images, targets).cpu() if maps is None else maps.cpu()
        for disturbance in DISTURBANCES.values():
            found = explain(model, disturbed(images, disturbance), targets).cpu()
            if found.shape != known.shape:
                raise InputError(f"expected maps of shape {tuple(known.shape)}, found {tuple(found.shape)}")
            rows, columns = known.shape[-2:]  # shifted by the same part of the sides as the images
            shift = disturbance.shift * rows / height, disturbance.shift * columns / width
            moved = shifted(known.float().unsqueeze(1), *shift).squeeze(1)
            expected = moved.flip(-1) if disturbance.flip else moved
            sound = map_faults(expected).sound & map_faults(found).sound
            both = [torch.where(sound[:, None, None], each.float(), 0.0) for each in (expected, found)]
            correlations.append(spearman(*both).masked_fill(~sound, torch.nan))
            tops = [each.flatten(1).argmax(1) for each in both]
            places = [torch.stack((top // columns / rows, top % columns / columns), 1) for top in tops]
            jumps.append(((places[0] - places[1]).abs().amax(1) > FAR) & ~correlations[-1].isnan())
    return Stability(torch.stack(correlations), torch.stack(jumps))


def disturbed(images: Images, disturbance: Disturbance) -> Images:
    """The images shifted right and down by bilinear interpolation, their edges repeated, or flipped."""
    moved = shifted(images, disturbance.shift, disturbance.shift)
    return moved.flip(-1) if disturbance.flip else moved


def shifted(
    values: Float[Tensor, "batch channels height width"], down: float, right: float
) -> Float[Tensor, "batch channels height width"]:
    """Values moved by numbers of pixels that need not be whole: linear between the pixels, the edge repeated."""
    for axis, amount in ((-2, down), (-1, right)):
        if not amount:
            continue
        places = torch.arange(values.shape[axis], dtype=torch.float64) - amount
        low, most = places.floor(), values.shape[axis] - 1
        share = (places - low).to(values).view((-1, 1) if axis == -2 else (-1,))
        below, above = (
            values.index_select(axis, (low + step).long().clamp(0, most).to(values.device)) for step in (0, 1)
        )
        values = below + share * (above - below)
    return values
