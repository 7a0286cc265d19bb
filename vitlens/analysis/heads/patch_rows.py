"""The rows of patches: what the attention weights of one layer say of where each head looks.

Rows of patches and the row of CLS are told apart; windows are calls of their own, whose padding does not look.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.offsets import offset_sums
from vitlens.analysis.heads.sharpness import entropy, gini, hoyer
from vitlens.analysis.heads.sinks import stand_out
from vitlens.lens.call import received

PerImage = Float[Tensor, "images heads"]


def sharp(weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The statistics of single rows, by name."""
    nats = entropy(weights)
    yield "entropy", nats
    yield "normalised_entropy", nats / max(math.log(weights.shape[-1]), 1e-12)
    yield "effective_keys", nats.exp()
    yield "hoyer", hoyer(weights)
    yield "gini", gini(weights)


class PatchRows:
    """Patches that look at patches: weights (images x calls, heads, query, key), calls being windows."""

    def __init__(self, weights: Tensor, images: int, geometry: Geometry) -> None:
        self.weights, self.images, self.geometry = weights, images, geometry
        self.queries = weights[..., geometry.prefix :, :]  # the patches' rows
        real = geometry.places().to(weights.device) >= 0
        self.looking = real.to(weights.dtype)  # (calls, patches): padding does not look
        self.rows = self.looking.sum()
        self.patches = self.between = self.queries[..., geometry.prefix :]  # of patches; of those that are neighbours
        if geometry.windows is not None:
            calls = self.patches.unflatten(0, (images, -1))
            self.patches = (calls * self.looking[:, None, None]).flatten(0, 1)
            self.between = (calls * geometry.pairs().to(weights.device)[:, None]).flatten(0, 1)

    def mean(self, values: Float[Tensor, "calls heads query"]) -> PerImage:
        """The mean over the patches that look."""
        each = values.unflatten(0, (self.images, -1)) * self.looking[:, None]
        means: PerImage = each.sum((1, 3)) / self.rows
        return means

    def sharpness(self) -> dict[str, PerImage]:
        """Entropy and sparsity, of patch rows and of the row of CLS."""
        found, prefix = {}, self.geometry.prefix
        for name, value in sharp(self.weights):
            found[name] = self.mean(value[..., prefix:])
            if self.geometry.cls:
                found[f"cls_{name}"] = value[..., self.geometry.cls[0]]
        return found

    def places(self, *, renormalise: bool) -> dict[str, PerImage]:
        """How far it looks, and how much lies on its own place."""
        mass, pixels = self.patches.sum(-1), self.geometry.distances().to(self.weights)
        away = (self.patches.unflatten(0, (self.images, -1)) * pixels[:, None]).sum(-1).flatten(0, 1)
        if renormalise:
            away = away / mass.clamp_min(torch.finfo(mass.dtype).tiny)
        return {"distance": self.mean(away), "self_mass": self.mean(self.between.diagonal(dim1=-2, dim2=-1))}

    def offsets(self) -> Float[Tensor, "images heads down across"]:
        """Mass by offset, a mean over queries."""
        sums = offset_sums(self.between, self.geometry.grid)
        means: Tensor = sums.unflatten(0, (self.images, -1)).sum(1) / self.rows
        return means

    def masses(self, offsets: Float[Tensor, "images heads down across"]) -> dict[str, PerImage]:
        """How much lies on neighbours, prefix and sinks; the mean square of a weight, for the rules of offsets."""
        geometry = self.geometry
        (down, across), found = geometry.grid, {}
        sides = [offsets[:, :, down - 1 + y, across - 1 + x] for y, x in _sides(geometry.grid)]
        found["neighbour_mass"] = torch.stack(sides).sum(0) if sides else offsets.new_zeros(offsets.shape[:2])
        squares = self.between.square().sum((-2, -1)).unflatten(0, (self.images, -1)).sum(1)
        found["energy"] = squares / self.rows
        looked_at = self._received()
        sinks = stand_out(looked_at)
        found["sinks"] = sinks.sum(-1).to(looked_at.dtype)
        found["sink_mass"] = (looked_at * sinks * self._lookers()).sum(-1)
        if geometry.prefix:
            found["prefix_mass"] = looked_at[..., : geometry.prefix].sum(-1)
            found["cls_mass"] = looked_at[..., list(geometry.cls)].sum(-1)
            found["register_mass"] = looked_at[..., list(geometry.registers)].sum(-1)
        if geometry.cls:
            own = self.weights[..., geometry.cls[0], :]
            found["cls_self_mass"] = own[..., geometry.cls[0]]
            found["cls_register_mass"] = own[..., list(geometry.registers)].sum(-1)
        return found

    def _received(self) -> Float[Tensor, "images heads key"]:
        """The mean weight that each key receives from the patches."""
        if self.geometry.windows is None:
            return self.queries.mean(-2)
        return received(self.weights, self.geometry.windows).flatten(2)

    def _lookers(self) -> Float[Tensor, " key"]:
        """The share of all patches that can look at each key: all of them, or those of its window."""
        windows, places = self.geometry.windows, self.geometry.places().to(self.weights.device)
        if windows is None:
            return self.looking.new_ones(self.weights.shape[-1])
        share = self.looking.new_zeros(windows.resolution[0] * windows.resolution[1] + 1)  # the last is for padding
        share[places] = (self.looking.sum(-1, keepdim=True) / self.rows).expand(places.shape)
        return share[:-1]


def _sides(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """The offsets of the neighbours that this grid has."""
    vertical = [(-1, 0), (1, 0)] if grid[0] > 1 else []
    return vertical + ([(0, -1), (0, 1)] if grid[1] > 1 else [])
