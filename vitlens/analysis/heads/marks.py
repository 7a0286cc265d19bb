"""What the label of a head rests on, in numbers that a reader can check: where it attends, how much it adds.

Intervals are those of the labels: over images, by a jackknife over their groups.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.evidence import uniform_received
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.patterns import left_out
from vitlens.analysis.heads.specialisation import half_width
from vitlens.analysis.heads.statistics import Statistics
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Marks:
    """One head. row, column: the patch that receives most attention, in the mean over images; grid: patches of the
    image; mass: the share of the patches' attention that it receives; chance: that of uniform attention; output: norm
    of what the head adds to the residual stream, a share of the mean of the model's heads (None: not known)."""

    row: int
    column: int
    grid: tuple[int, int]
    mass: Estimate
    chance: float
    output: Estimate | None


def marks(table: Statistics) -> tuple[tuple[Marks, ...], ...]:
    """The marks of every head by layer, empty for a layer whose attention has no place in the image; the statistics
    must hold the evidence for labels."""
    return tuple(
        () if place is None or ("received", layer) not in table.evidence.sums else _of_layer(table, layer, place)
        for layer, place in enumerate(table.geometries)
    )


def sinks_off_object(table: Statistics) -> Estimate | None:
    """The share of the patches' attention on sinks that lie off the object, the mean over heads; None without masks."""
    sums = [value for (name, _), value in sorted(table.evidence.sums.items()) if name == "sinks_off"]
    if not sums:
        return None
    return _estimate(left_out(torch.cat(sums, 1).mean(1), table.evidence.counts), table.images)


def _of_layer(table: Statistics, layer: int, place: Geometry) -> tuple[Marks, ...]:
    counts = table.evidence.counts
    received = left_out(table.evidence.sums["received", layer], counts)[
        ..., place.prefix :
    ]  # (samples, heads, patches)
    chance = uniform_received(place)[place.prefix :]
    grid = place.grid if place.windows is None else place.windows.resolution
    outputs = _outputs(table, layer)
    found = []
    for head, of_head in enumerate(received.unbind(1)):
        most = int(of_head[0].argmax())
        found.append(
            Marks(
                most // grid[1],
                most % grid[1],
                (grid[0], grid[1]),
                _estimate(of_head[:, most], table.images),
                float(chance[most]),
                None if outputs is None else _estimate(outputs[:, head], table.images),
            )
        )
    return tuple(found)


def _outputs(table: Statistics, layer: int) -> Float[Tensor, "samples heads"] | None:
    """The norms of a layer's heads as shares of the mean over the model's heads; None where they are not known."""
    sums, counts = table.evidence.sums, table.evidence.counts
    known = [value for (name, _), value in sums.items() if name == "output"]
    if ("output", layer) not in sums:
        return None
    mean = left_out(torch.cat(known, 1), counts).mean(1, keepdim=True)
    return left_out(sums["output", layer], counts) / mean.clamp_min(torch.finfo(torch.float64).tiny)


def _estimate(samples: Float[Tensor, " samples"], images: int) -> Estimate:
    """The value with its interval; without one for a single group of images."""
    value, half = float(samples[0]), half_width(samples)
    if half != half:  # NaN
        return Estimate(value, n=images)
    return Estimate(value, max(0.0, value - half), value + half, images)
