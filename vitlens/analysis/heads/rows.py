"""The statistics of attention weights: of single rows, and of one layer between patches. What each
is: registry.py.

Formulas of rows, entropy and sparsity, are arranged to be precise in fp32 also for nearly uniform
rows, where the textbook forms subtract almost equal numbers. Of a layer, the rows of patches and
the row of CLS are treated separately, each window is one call, and padding is no query.
"""

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
_TINY = 1e-12
_BELOW = 2.0  # a weight is at most 1 below that of uniform attention
# of the median: equal values differ by rounding, as does their median absolute deviation
_ROUNDING = 1e-4


class Rows:
    """Rows of attention weights, and the keys that each may attend to; what several statistics need
    is computed once.

    allowed: True for these keys, of a shape that broadcasts to that of the weights; None: every
    key.
    """

    def __init__(self, weights: Row, allowed: Tensor | None = None) -> None:
        self.weights = weights
        self.allowed = allowed

    @cached_property
    def keys(self) -> Number:
        """Return the number of keys that each row may attend to; it broadcasts to one number per
        row.
        """
        if self.allowed is None:
            return self.weights.new_tensor(float(self.weights.shape[-1]))
        return self.allowed.sum(-1).to(self.weights)

    @cached_property
    def deviations(self) -> Row:
        """Return each weight minus that of uniform attention on the same keys; 0 for masked
        keys."""
        if self.allowed is None:
            return self.weights - 1 / self.weights.shape[-1]
        return (self.weights - 1 / self.keys[..., None]) * self.allowed

    @cached_property
    def entropy(self) -> Number:
        """Entropy of each row, nats."""
        # several times faster than torch.special.entr; the clamp makes 0 log 0 zero
        logarithms = self.weights.clamp_min(torch.finfo(self.weights.dtype).tiny).log()
        return -(self.weights * logarithms).sum(-1)


class PatchRows:
    """One layer's weights (images x calls, heads, query, key), a call being a window, and what
    statistics share.

    renormalise: distances are of the attention on patches, scaled to sum to 1; allowed (calls of an
    image, heads or 1, query or 1, key): the keys that a query may attend to, None: every key.
    """

    def __init__(
        self,
        weights: Tensor,
        images: int,
        geometry: Geometry,
        *,
        renormalise: bool = True,
        allowed: Tensor | None = None,
    ) -> None:
        self.weights = weights
        self.images = images
        self.geometry = geometry
        self.renormalise = renormalise
        self.allowed = allowed
        self.queries = weights[..., geometry.prefix :, :]  # the patches' rows
        real = geometry.places().to(weights.device) >= 0
        self.real = real.to(weights.dtype)  # (calls, patches): 0 for padding
        self.count = self.real.sum()  # of queries that are patches
        # weights between patches; without those across the seam of a shifted window
        self.on_patches = self.on_neighbours = self.queries[..., geometry.prefix :]
        if geometry.windows is not None:
            calls = self.on_patches.unflatten(0, (images, -1))
            self.on_patches = (calls * self.real[:, None, None]).flatten(0, 1)
            self.on_neighbours = (calls * geometry.pairs().to(weights.device)[:, None]).flatten(
                0, 1
            )

    def statistics(self) -> dict[str, PerImage]:
        """Return every registered statistic that this layer has, by name."""
        place = self.geometry
        of_patches = row_statistics(
            self.queries, "patches", self._allowed_of(slice(place.prefix, None))
        )
        found = {name: self.mean(values) for name, values in of_patches.items()}
        if place.cls:
            found |= row_statistics(self.cls_row, "CLS", self._allowed_of(place.cls[0]))
        has = {"grid": True, "prefix": place.prefix > 0, "cls": bool(place.cls)}
        for name, statistic in head_statistics().items():
            if statistic.input == "layer" and all(has[need] for need in statistic.needs):
                found[name] = FUNCTIONS[name](self)
        return found

    def _allowed_of(self, queries: slice | int) -> Tensor | None:
        """Return the keys that some queries of every call may attend to."""
        if self.allowed is None:
            return None
        query = (
            queries
            if self.allowed.shape[-2] > 1
            else (0 if isinstance(queries, int) else slice(None))
        )
        return self.allowed[:, :, query].repeat(
            self.images, *[1] * (3 if isinstance(query, slice) else 2)
        )

    def mean(self, values: Float[Tensor, "calls heads query"]) -> PerImage:
        """Return the mean over the patch queries."""
        each = values.unflatten(0, (self.images, -1)) * self.real[:, None]
        means: PerImage = each.sum((1, 3)) / self.count
        return means

    def mean_sum(
        self, values: Float[Tensor, "calls heads *rest"]
    ) -> Float[Tensor, "images heads *rest"]:
        """Return sums over a window's queries as means over all queries of an image."""
        means: Tensor = values.unflatten(0, (self.images, -1)).sum(1) / self.count
        return means

    @cached_property
    def offsets(self) -> Float[Tensor, "images heads down across"]:
        """Return the mass by offset, averaged over queries."""
        return self.mean_sum(self.geometry.by_offset(self.on_neighbours))

    @cached_property
    def received(self) -> Float[Tensor, "images heads key"]:
        """Return the mean weight that each key receives from the patches that can attend to it."""
        if self.geometry.windows is None:
            return self.queries.mean(-2)
        return received(self.weights, self.geometry.windows).flatten(2)

    @cached_property
    def received_of_all(self) -> Float[Tensor, "images heads key"]:
        """Return the mean weight that each key receives from all patches."""
        return self.received * self.geometry.share_of_queries().to(self.weights)

    @cached_property
    def sinks(self) -> Bool[Tensor, "images heads key"]:
        """Return which keys receive more than their row's median + 5 median absolute deviations.

        In units of what uniform attention gives them: in a padded or cut window fewer patches share
        the attention.
        """
        return outliers(self.received / self._received_of_uniform)

    @cached_property
    def _received_of_uniform(self) -> Tensor:
        """Return the mean weight that each key receives where attention is uniform; 1 where it is
        the same for all keys.
        """
        if self.geometry.windows is None:
            return self.weights.new_ones(())
        calls = len(self.weights) // self.images
        allowed = self.weights.new_ones(calls, 1, *self.weights.shape[-2:])
        if self.allowed is not None:
            allowed = allowed * self.allowed
        uniform = allowed / allowed.sum(-1, keepdim=True).clamp_min(1)
        return received(uniform, self.geometry.windows).flatten(2).clamp_min(_TINY)

    @property
    def cls_row(self) -> Float[Tensor, "images heads key"]:
        """Return the row of the CLS token."""
        return self.weights[..., self.geometry.cls[0], :]


@dataclass(frozen=True)
class TokenNorms:
    """Euclidean norms of the tokens of the residual stream after one block; prefix: the number of
    prefix tokens.
    """

    norms: Float[Tensor, "images tokens"]
    prefix: int

    @cached_property
    def high(self) -> Float[Tensor, "images tokens"]:
        """1 where a norm exceeds its image's median + 5 median absolute deviations, else 0."""
        return outliers(self.norms).float()


def row_statistics(
    weights: Row, of: Literal["patches", "CLS"], allowed: Tensor | None = None
) -> dict[str, Number]:
    """Return the registered statistics of the rows of patches, or of CLS and pooling queries, one
    number per row.

    allowed: see `Rows`.
    """
    rows = Rows(weights, allowed)
    return {
        name: FUNCTIONS[statistic.function or name](rows)
        for name, statistic in head_statistics().items()
        if statistic.input == "row" and statistic.rows == of
    }


def normalised_entropy(rows: Rows) -> Number:
    """Return the entropy as a share of that of uniform attention on the same keys; 1 where a mask
    leaves a single key.
    """
    share = (rows.entropy / rows.keys.log().clamp_min(_TINY)).clamp(0, 1)
    return share if rows.allowed is None else torch.where(rows.keys > 1, share, 1.0)


def hoyer(rows: Rows) -> Number:
    """Hoyer's sparsity (Hoyer 2004), (√n - l1/l2) / (√n - 1): 0 for uniform attention, 1 for one
    key; 0 where n = 1.
    """
    excess = rows.keys * rows.deviations.square().sum(-1)  # n · l2² - 1 for rows that sum to 1
    root = (1 + excess).sqrt()
    sides = rows.keys.sqrt()
    sparsity = excess / (root * (root + 1)) * (sides / (sides - 1).clamp_min(_TINY))
    return torch.where(rows.keys > 1, sparsity.clamp(0, 1), 0.0)


def gini(rows: Rows) -> Number:
    """Return the Gini coefficient of each row's weights: 0 for uniform attention, 1 - 1/n for one
    key.
    """
    size = rows.weights.shape[-1]
    steps = torch.arange(
        1 - size, size, 2, dtype=rows.weights.dtype, device=rows.weights.device
    )  # 2 i - n - 1
    if rows.allowed is None:
        coefficients = ascending(rows.deviations) @ steps / size
    else:  # masked keys come first, and have no rank
        masked = size - rows.keys[..., None]
        ordered = ascending(rows.deviations.where(rows.allowed, -_BELOW))
        ranks = (steps - masked).where(ordered > -_BELOW, 0.0)
        coefficients = (ordered * ranks).sum(-1) / rows.keys
    return coefficients.clamp(0, 1)


def distance(layer: PatchRows) -> PerImage:
    """Mean distance in px from a patch to the patches that it attends to."""
    mass = layer.on_patches.sum(-1)
    pixels = layer.geometry.distances().to(layer.weights)
    away = (
        (layer.on_patches.unflatten(0, (layer.images, -1)) * pixels[:, None]).sum(-1).flatten(0, 1)
    )
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
    """Return each row in ascending order."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(
        np.sort(values.detach().numpy(), axis=-1)
    )  # 25 times faster than torch on the CPU


def outliers(values: Float[Tensor, "*leading token"]) -> Bool[Tensor, "*leading token"]:
    """Return which values exceed their row's median by more than 5 median absolute deviations (and
    0.01 % of the median).
    """
    middle = median(values)[..., None]
    deviation = median((values - middle).abs())[..., None]
    return values - middle > torch.maximum(DEVIATIONS * deviation, _ROUNDING * middle.abs())


def median(values: Float[Tensor, "*leading token"]) -> Float[Tensor, "*leading"]:
    """Return the median of each row; for an even number of values the mean of the two middle ones
    (torch takes the lower).
    """
    ordered = ascending(values)
    size = values.shape[-1]
    return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2


# By name of the statistic: of Rows one number per row, of PatchRows per image and head, of
# TokenNorms per image.
FUNCTIONS: Final[dict[str, Callable[[Any], Tensor]]] = {
    "entropy": lambda rows: rows.entropy,
    "normalised_entropy": normalised_entropy,
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
