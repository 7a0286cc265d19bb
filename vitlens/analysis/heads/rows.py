"""The statistics of attention weights: of single rows, and of one layer between patches. What each is: registry.py.

Formulas of rows, entropy and sparsity, are arranged to be precise in fp32 also for nearly uniform rows, where the
textbook forms subtract almost equal numbers. Of a layer, the rows of patches and the row of CLS are treated separately,
each window is one call, and padding is no query.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.registry import head_statistics
from vitlens.lens.call import received

Row = Float[Tensor, "*leading key"]
Number = Float[Tensor, "*leading"]
PerImage = Float[Tensor, "images heads"]
PerHead = Float[Tensor, "layers heads"]

DEVIATIONS = 5  # median absolute deviations above the median
_ROUNDING = 1e-4  # of the median: equal values differ by rounding, as does their median absolute deviation


class Rows:
    """Rows of attention weights; the entropy, which several statistics need, is computed once."""

    def __init__(self, weights: Row) -> None:
        self.weights = weights

    @cached_property
    def entropy(self) -> Number:
        """Entropy of each row, nats."""
        # several times faster than torch.special.entr; the clamp makes 0 log 0 zero
        logarithms = self.weights.clamp_min(torch.finfo(self.weights.dtype).tiny).log()
        return -(self.weights * logarithms).sum(-1)


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
        place = self.geometry
        found = {name: self.mean(values) for name, values in row_statistics(self.queries, "patches").items()}
        if place.cls:
            found |= row_statistics(self.cls_row, "CLS")
        has = {"grid": True, "prefix": place.prefix > 0, "cls": bool(place.cls)}
        for name, statistic in head_statistics().items():
            if statistic.input == "layer" and all(has[need] for need in statistic.needs):
                found[name] = FUNCTIONS[name](self)
        return found

    def mean(self, values: Float[Tensor, "calls heads query"]) -> PerImage:
        """The mean over the patch queries."""
        each = values.unflatten(0, (self.images, -1)) * self.real[:, None]
        means: PerImage = each.sum((1, 3)) / self.count
        return means

    def mean_sum(self, values: Float[Tensor, "calls heads *rest"]) -> Float[Tensor, "images heads *rest"]:
        """Sums over a window's queries as means over all queries of an image."""
        means: Tensor = values.unflatten(0, (self.images, -1)).sum(1) / self.count
        return means

    @cached_property
    def offsets(self) -> Float[Tensor, "images heads down across"]:
        """The mass by offset, averaged over queries."""
        return self.mean_sum(self.geometry.by_offset(self.on_neighbours))

    @cached_property
    def received(self) -> Float[Tensor, "images heads key"]:
        """The mean weight that each key receives from the patches that can attend to it."""
        if self.geometry.windows is None:
            return self.queries.mean(-2)
        return received(self.weights, self.geometry.windows).flatten(2)

    @cached_property
    def received_of_all(self) -> Float[Tensor, "images heads key"]:
        """The mean weight that each key receives from all patches."""
        return self.received * self.geometry.share_of_queries().to(self.weights)

    @cached_property
    def sinks(self) -> Bool[Tensor, "images heads key"]:
        """Which keys receive more than their row's median + 5 median absolute deviations."""
        return outliers(self.received)

    @property
    def cls_row(self) -> Float[Tensor, "images heads key"]:
        """The row of the CLS token."""
        return self.weights[..., self.geometry.cls[0], :]


@dataclass(frozen=True)
class TokenNorms:
    """Euclidean norms of the tokens of the residual stream after one block; prefix: the number of prefix tokens."""

    norms: Float[Tensor, "images tokens"]
    prefix: int

    @cached_property
    def high(self) -> Float[Tensor, "images tokens"]:
        """1 where a norm exceeds its image's median + 5 median absolute deviations, else 0."""
        return outliers(self.norms).float()


def row_statistics(weights: Row, of: Literal["patches", "CLS"]) -> dict[str, Number]:
    """The registered statistics of the rows of patches, or of CLS and pooling queries, one number per row."""
    rows = Rows(weights)
    return {
        name: FUNCTIONS[statistic.function or name](rows)
        for name, statistic in head_statistics().items()
        if statistic.input == "row" and statistic.rows == of
    }


def hoyer(rows: Rows) -> Number:
    """Hoyer's sparsity (Hoyer 2004), (√n - l1/l2) / (√n - 1): 0 for uniform attention, 1 for one key; 0 where n = 1."""
    keys = rows.weights.shape[-1]
    if keys == 1:
        return torch.zeros_like(rows.weights[..., 0])
    excess = keys * (rows.weights - 1 / keys).square().sum(-1)  # n · l2² - 1 for rows that sum to 1
    root = (1 + excess).sqrt()
    return excess / (root * (root + 1)) * (math.sqrt(keys) / (math.sqrt(keys) - 1))


def gini(rows: Rows) -> Number:
    """The Gini coefficient of each row's weights: 0 for uniform attention, 1 - 1/n for one key."""
    keys = rows.weights.shape[-1]
    ranks = torch.arange(1 - keys, keys, 2, dtype=rows.weights.dtype, device=rows.weights.device)  # 2 i - n - 1
    return ascending(rows.weights - 1 / keys) @ ranks / keys


def distance(layer: PatchRows) -> PerImage:
    """Mean distance in px from a patch to the patches that it attends to."""
    mass, pixels = layer.on_patches.sum(-1), layer.geometry.distances().to(layer.weights)
    away = (layer.on_patches.unflatten(0, (layer.images, -1)) * pixels[:, None]).sum(-1).flatten(0, 1)
    if layer.renormalise:
        away = away / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    return layer.mean(away)


def neighbour_mass(layer: PatchRows) -> PerImage:
    """Mean weight on the four adjacent patches, as far as they exist."""
    rows, columns = layer.geometry.span
    sides = [(-1, 0), (1, 0)] * (rows > 1) + [(0, -1), (0, 1)] * (columns > 1)
    each = [layer.offsets[:, :, rows - 1 + down, columns - 1 + across] for down, across in sides]
    return torch.stack(each).sum(0) if each else layer.offsets.new_zeros(layer.offsets.shape[:2])


def ascending(values: Row) -> Row:
    """Each row in ascending order."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1))  # 25 times faster than torch on the CPU


def outliers(values: Float[Tensor, "*leading token"]) -> Bool[Tensor, "*leading token"]:
    """Which values exceed their row's median by more than 5 median absolute deviations (and 0.01 % of the median)."""
    middle = median(values)[..., None]
    deviation = median((values - middle).abs())[..., None]
    return values - middle > torch.maximum(DEVIATIONS * deviation, _ROUNDING * middle.abs())


def median(values: Float[Tensor, "*leading token"]) -> Float[Tensor, "*leading"]:
    """The median of each row; for an even number of values the mean of the two middle ones (torch takes the lower)."""
    ordered, size = ascending(values), values.shape[-1]
    return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2


# By name of the statistic: of Rows one number per row, of PatchRows per image and head, of TokenNorms per image.
FUNCTIONS: Final[dict[str, Callable[[Any], Tensor]]] = {
    "entropy": lambda rows: rows.entropy,
    "normalised_entropy": lambda rows: rows.entropy / max(math.log(rows.weights.shape[-1]), 1e-12),
    "effective_keys": lambda rows: rows.entropy.exp(),
    "hoyer": hoyer,
    "gini": gini,
    "distance": distance,
    "self_mass": lambda layer: layer.mean(layer.on_neighbours.diagonal(dim1=-2, dim2=-1)),
    "neighbour_mass": neighbour_mass,
    "cls_mass": lambda layer: layer.received[..., list(layer.geometry.cls)].sum(-1),
    "register_mass": lambda layer: layer.received[..., list(layer.geometry.registers)].sum(-1),
    "prefix_mass": lambda layer: layer.received[..., : layer.geometry.prefix].sum(-1),
    "sinks": lambda layer: layer.sinks.sum(-1).to(layer.received.dtype),
    "sink_mass": lambda layer: (layer.received_of_all * layer.sinks).sum(-1),
    "energy": lambda layer: layer.mean_sum(layer.on_neighbours.square().sum((-2, -1))),
    "cls_self_mass": lambda layer: layer.cls_row[..., layer.geometry.cls[0]],
    "cls_register_mass": lambda layer: layer.cls_row[..., list(layer.geometry.registers)].sum(-1),
    "token_norm": lambda tokens: median(tokens.norms),
    "greatest_norm": lambda tokens: tokens.norms.amax(-1),
    "high_norm_patches": lambda tokens: tokens.high[:, tokens.prefix :].sum(-1),
    "high_norm_prefix": lambda tokens: tokens.high[:, : tokens.prefix].sum(-1),
}
