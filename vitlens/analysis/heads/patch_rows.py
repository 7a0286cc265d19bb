"""Statistics of one attention layer between patches: distance, mass on the patch itself, on CLS, on sinks.

The rows of patches and the row of CLS are treated separately; each window is one call, and padding is no query.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.registry import Need, head_statistics
from vitlens.analysis.heads.rows import Rows, outliers
from vitlens.lens.call import received
from vitlens.references import resolved

PerImage = Float[Tensor, "images heads"]


class PatchRows:
    """One layer's weights (images x calls, heads, query, key), a call being a window, and what statistics share.

    renormalise: distances are of the attention on patches, scaled to sum to 1.
    """

    def __init__(self, weights: Tensor, images: int, geometry: Geometry, *, renormalise: bool = True) -> None:
        self.weights, self.images, self.geometry, self.renormalise = weights, images, geometry, renormalise
        self.queries = weights[..., geometry.prefix :, :]  # the patches' rows
        real = geometry.places().to(weights.device) >= 0
        self.real = real.to(weights.dtype)  # (calls, patches): 0 for padding
        self.count = self.real.sum()  # of queries that are patches
        # weights between patches; without those across the seam of a shifted window
        self.on_patches = self.on_neighbours = self.queries[..., geometry.prefix :]
        if geometry.windows is not None:
            calls = self.on_patches.unflatten(0, (images, -1))
            self.on_patches = (calls * self.real[:, None, None]).flatten(0, 1)
            self.on_neighbours = (calls * geometry.pairs().to(weights.device)[:, None]).flatten(0, 1)

    def statistics(self) -> dict[str, PerImage]:
        """Every registered statistic that this layer has, by name."""
        rows, prefix = Rows(self.weights), self.geometry.prefix
        of_rows: dict[str, Tensor] = {}  # computed once for the rows of patches and of CLS
        measured: dict[str, PerImage] = {}
        for name, statistic in head_statistics().items():
            if not all(self.has(need) for need in statistic.needs):
                continue
            function: Callable[..., Tensor] = resolved(statistic.function)
            if statistic.input == "layer":
                measured[name] = function(self)
                continue
            if statistic.function not in of_rows:
                of_rows[statistic.function] = function(rows)
            values = of_rows[statistic.function]
            patches = statistic.rows == "patches"
            measured[name] = self.mean(values[..., prefix:]) if patches else values[..., self.geometry.cls[0]]
        return measured

    def has(self, need: Need) -> bool:
        """Whether the layer meets a requirement of a statistic."""
        return {"grid": True, "prefix": self.geometry.prefix > 0, "cls": bool(self.geometry.cls)}[need]

    def mean(self, values: Float[Tensor, "calls heads query"]) -> PerImage:
        """The mean over the patch queries."""
        each = values.unflatten(0, (self.images, -1)) * self.real[:, None]
        means: PerImage = each.sum((1, 3)) / self.count
        return means

    @cached_property
    def offsets(self) -> Float[Tensor, "images heads down across"]:
        """The mass by offset, averaged over queries."""
        sums = self.geometry.by_offset(self.on_neighbours)
        means: Tensor = sums.unflatten(0, (self.images, -1)).sum(1) / self.count
        return means

    @cached_property
    def received(self) -> Float[Tensor, "images heads key"]:
        """The mean weight that each key receives from the patches."""
        if self.geometry.windows is None:
            return self.queries.mean(-2)
        return received(self.weights, self.geometry.windows).flatten(2)

    @cached_property
    def sinks(self) -> Bool[Tensor, "images heads key"]:
        """Which keys receive more than their row's median + 5 median absolute deviations."""
        return outliers(self.received)

    @property
    def cls_row(self) -> Float[Tensor, "images heads key"]:
        """The row of the CLS token."""
        return self.weights[..., self.geometry.cls[0], :]

    def share_of_queries(self) -> Float[Tensor, " key"]:
        """The share of all patches that can attend to each key: all of them, or those of its window."""
        windows, places = self.geometry.windows, self.geometry.places().to(self.weights.device)
        if windows is None:
            return self.real.new_ones(self.weights.shape[-1])
        share = self.real.new_zeros(windows.resolution[0] * windows.resolution[1] + 1)  # the last is for padding
        share[places] = (self.real.sum(-1, keepdim=True) / self.count).expand(places.shape)
        return share[:-1]


def distance(layer: PatchRows) -> PerImage:
    """Mean distance in px from a patch to the patches that it attends to."""
    mass, pixels = layer.on_patches.sum(-1), layer.geometry.distances().to(layer.weights)
    away = (layer.on_patches.unflatten(0, (layer.images, -1)) * pixels[:, None]).sum(-1).flatten(0, 1)
    if layer.renormalise:
        away = away / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    return layer.mean(away)


def self_mass(layer: PatchRows) -> PerImage:
    """Mean weight of a patch on itself."""
    return layer.mean(layer.on_neighbours.diagonal(dim1=-2, dim2=-1))


def neighbour_mass(layer: PatchRows) -> PerImage:
    """Mean weight on the four adjacent patches, as far as they exist."""
    rows, columns = layer.geometry.span
    vertical = [(-1, 0), (1, 0)] if rows > 1 else []
    sides = vertical + ([(0, -1), (0, 1)] if columns > 1 else [])
    each = [layer.offsets[:, :, rows - 1 + down, columns - 1 + across] for down, across in sides]
    return torch.stack(each).sum(0) if each else layer.offsets.new_zeros(layer.offsets.shape[:2])


def energy(layer: PatchRows) -> PerImage:
    """The sum of a row's squared weights on patches, averaged over rows; explained_by_offset needs it."""
    squares: Tensor = layer.on_neighbours.square().sum((-2, -1)).unflatten(0, (layer.images, -1)).sum(1)
    return squares / layer.count


def sinks(layer: PatchRows) -> PerImage:
    """The number of sinks."""
    return layer.sinks.sum(-1).to(layer.received.dtype)


def sink_mass(layer: PatchRows) -> PerImage:
    """Mean weight of patches on sinks."""
    return (layer.received * layer.sinks * layer.share_of_queries()).sum(-1)


def prefix_mass(layer: PatchRows) -> PerImage:
    """Mean weight of patches on all prefix tokens."""
    return layer.received[..., : layer.geometry.prefix].sum(-1)


def cls_mass(layer: PatchRows) -> PerImage:
    """Mean weight of patches on CLS."""
    return layer.received[..., list(layer.geometry.cls)].sum(-1)


def register_mass(layer: PatchRows) -> PerImage:
    """Mean weight of patches on registers and distillation token."""
    return layer.received[..., list(layer.geometry.registers)].sum(-1)


def cls_self_mass(layer: PatchRows) -> PerImage:
    """Weight of CLS on itself."""
    return layer.cls_row[..., layer.geometry.cls[0]]


def cls_register_mass(layer: PatchRows) -> PerImage:
    """Weight of CLS on registers and distillation token."""
    return layer.cls_row[..., list(layer.geometry.registers)].sum(-1)
