"""Statistics of attention weights: of single rows, of one layer between patches, of token norms.

registry.py defines each of them. For nearly uniform rows, the textbook forms of entropy and
sparsity subtract almost equal numbers. The forms here are precise in fp32 also for such rows.

The rows of patches and the row of CLS are treated separately. Each window is one call, and padding
is no query.
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

DEVIATIONS = 5  # outliers are more median absolute deviations above the median
_TINY = 1e-12  # avoids a division by 0
_MASKED_DEVIATION = -2.0  # marks masked keys in deviations, which are at least -1
# Outliers are also larger than the median by more than this part of it. Equal values differ by
# rounding, and so does their median absolute deviation.
_ROUNDING = 1e-4


class Rows:
    """Rows of attention weights, and values that several of their statistics share.

    weights (.., key): the rows.
    allowed: True for keys that a row may attend to, in a shape that broadcasts to the weights. None
        if all keys are allowed.
    """

    def __init__(self, weights: Row, allowed: Tensor | None = None) -> None:
        self.weights = weights
        self.allowed = allowed

    @cached_property
    def keys(self) -> Number:
        """Return the number of keys that each row may attend to, or one number for all rows."""
        if self.allowed is None:
            return self.weights.new_tensor(float(self.weights.shape[-1]))
        return self.allowed.sum(-1).to(self.weights)

    @cached_property
    def deviations(self) -> Row:
        """Return the weights minus uniform attention on the same keys; 0 for masked keys."""
        if self.allowed is None:
            return self.weights - 1 / self.weights.shape[-1]
        return (self.weights - 1 / self.keys[..., None]) * self.allowed

    @cached_property
    def entropy(self) -> Number:
        """Return the entropy of each row, nats."""
        # several times faster than torch.special.entr; the clamp makes 0 log 0 zero
        logarithms = self.weights.clamp_min(torch.finfo(self.weights.dtype).tiny).log()
        return -(self.weights * logarithms).sum(-1)


class PatchRows:
    """The weights of one layer between patches, and values that several statistics share.

    weights (images x calls, heads, query, key): the attention weights; a call is a window.
    images: the number of images.
    geometry: the places of queries and keys in the image.
    renormalise: True if distances are of the attention on patches, scaled to sum to 1.
    allowed (calls of an image, heads or 1, query or 1, key): the keys that a query may attend to.
        None if all keys are allowed.

    queries: the rows of patches.
    on_patches: the weights between patches.
    on_patches_in_image: the weights between patches that lie in the window also in the image; 0
        across the seam of a shifted window.
    is_patch (calls of an image, patches): 1 for a patch, 0 for padding.
    count: the number of patches of an image.
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
        self.queries = weights[..., geometry.prefix :, :]
        is_patch = geometry.places().to(weights.device) >= 0
        self.is_patch = is_patch.to(weights.dtype)
        self.count = self.is_patch.sum()
        self.on_patches = self.queries[..., geometry.prefix :]
        self.on_patches_in_image = self.on_patches
        if geometry.windows is not None:
            # as (images, calls, heads, query, key)
            calls = self.on_patches.unflatten(0, (images, -1))
            pairs = geometry.pairs().to(weights.device)
            self.on_patches = (calls * self.is_patch[:, None, None]).flatten(0, 1)
            self.on_patches_in_image = (calls * pairs[:, None]).flatten(0, 1)

    def statistics(self) -> dict[str, PerImage]:
        """Return every registered statistic that this layer has, by name."""
        geometry = self.geometry
        patch_keys = self._allowed_of(slice(geometry.prefix, None))
        patch_statistics = row_statistics(self.queries, "patches", patch_keys)
        values = {name: self.mean(of_rows) for name, of_rows in patch_statistics.items()}
        if geometry.cls:
            cls_keys = self._allowed_of(geometry.cls[0])
            values.update(row_statistics(self.cls_row, "CLS", cls_keys))
        has = {"grid": True, "prefix": geometry.prefix > 0, "cls": bool(geometry.cls)}
        for name, statistic in head_statistics().items():
            if statistic.input == "layer" and all(has[need] for need in statistic.needs):
                values[name] = FUNCTIONS[name](self)
        return values

    def _allowed_of(self, queries: slice | int) -> Tensor | None:
        """Return the keys that some queries of every call may attend to."""
        if self.allowed is None:
            return None
        if isinstance(queries, int):
            # an axis of length 1 holds for all queries
            row = queries if self.allowed.shape[-2] > 1 else 0
            return self.allowed[:, :, row].repeat(self.images, 1, 1)
        rows = self.allowed[:, :, queries] if self.allowed.shape[-2] > 1 else self.allowed
        return rows.repeat(self.images, 1, 1, 1)

    def mean(self, values: Float[Tensor, "images_x_calls heads query"]) -> PerImage:
        """Return the mean over the patch queries."""
        # as (images, calls, heads, query), 0 for padding
        patch_values = values.unflatten(0, (self.images, -1)) * self.is_patch[:, None]
        means: PerImage = patch_values.sum((1, 3)) / self.count
        return means

    def mean_sum(
        self, values: Float[Tensor, "images_x_calls heads *rest"]
    ) -> Float[Tensor, "images heads *rest"]:
        """Return sums over a window's queries as means over all queries of an image."""
        means: Tensor = values.unflatten(0, (self.images, -1)).sum(1) / self.count
        return means

    @cached_property
    def offsets(self) -> Float[Tensor, "images heads down across"]:
        """Return the mass by offset, the mean over queries."""
        return self.mean_sum(self.geometry.by_offset(self.on_patches_in_image))

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
        """Return the keys that receive more than the median + 5 median absolute deviations.

        The mass is in units of what the key receives from uniform attention, because fewer patches
        share the attention in a padded or cut window.
        """
        return outliers(self.received / self._received_of_uniform)

    @cached_property
    def _received_of_uniform(self) -> Tensor:
        """Return the mean weight that each key receives from uniform attention.

        Without windows it is the same for all keys, and 1 is returned: the unit does not matter.
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
    """Euclidean norms of the tokens of the residual stream after one block.

    prefix: the number of tokens before the patches.
    """

    norms: Float[Tensor, "images tokens"]
    prefix: int

    @cached_property
    def high(self) -> Float[Tensor, "images tokens"]:
        """Return 1 for norms above their image's median + 5 median absolute deviations, else 0."""
        return outliers(self.norms).float()


def row_statistics(
    weights: Row, queries: Literal["patches", "CLS"], allowed: Tensor | None = None
) -> dict[str, Number]:
    """Return the registered statistics of rows, one number per row.

    queries: the queries of the rows; "CLS" also for pooling queries.
    allowed: see `Rows`.
    """
    rows = Rows(weights, allowed)
    values = {}
    for name, statistic in head_statistics().items():
        if statistic.input == "row" and statistic.rows == queries:
            values[name] = FUNCTIONS[statistic.function or name](rows)
    return values


def normalised_entropy(rows: Rows) -> Number:
    """Return the entropy as a share of that of uniform attention on the same keys.

    If a mask leaves a single key, it is 1.
    """
    share = (rows.entropy / rows.keys.log().clamp_min(_TINY)).clamp(0, 1)
    if rows.allowed is None:
        return share
    return torch.where(rows.keys > 1, share, 1.0)


def hoyer(rows: Rows) -> Number:
    """Return Hoyer's sparsity, (√n - l1/l2) / (√n - 1): 0 for uniform attention, 1 for one key.

    For n = 1 it is 0. Source: Hoyer 2004.
    """
    # For rows that sum to 1, excess is n · l2² - 1 and norm is √n · l2. The sparsity is then
    # (√n - √n / norm) / (√n - 1) with norm - 1 = excess / (norm + 1), which is precise near 0.
    excess = rows.keys * rows.deviations.square().sum(-1)
    norm = (1 + excess).sqrt()
    root = rows.keys.sqrt()
    sparsity = excess / (norm * (norm + 1)) * (root / (root - 1).clamp_min(_TINY))
    return torch.where(rows.keys > 1, sparsity.clamp(0, 1), 0.0)


def gini(rows: Rows) -> Number:
    """Return the Gini coefficient of each row: 0 for uniform attention, 1 - 1/n for one key."""
    size = rows.weights.shape[-1]
    # the factor of the i-th smallest of n weights is 2 i - n - 1
    factors = torch.arange(1 - size, size, 2, dtype=rows.weights.dtype, device=rows.weights.device)
    if rows.allowed is None:
        coefficients = ascending(rows.deviations) @ factors / size
    else:
        # masked keys come first in this order, which moves the factors, and have the factor 0
        ordered = ascending(rows.deviations.where(rows.allowed, _MASKED_DEVIATION))
        masked_count = size - rows.keys[..., None]
        factors = (factors - masked_count).where(ordered > _MASKED_DEVIATION, 0.0)
        coefficients = (ordered * factors).sum(-1) / rows.keys
    return coefficients.clamp(0, 1)


def distance(layer: PatchRows) -> PerImage:
    """Return the mean distance in px from a patch to the patches that it attends to."""
    pixels = layer.geometry.distances().to(layer.weights)
    weighted = layer.on_patches.unflatten(0, (layer.images, -1)) * pixels[:, None]
    distances = weighted.sum(-1).flatten(0, 1)  # (images x calls, heads, query)
    if layer.renormalise:
        mass = layer.on_patches.sum(-1)
        distances = distances / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    return layer.mean(distances)


def neighbour_mass(layer: PatchRows) -> PerImage:
    """Return the mean weight on the four adjacent patches, as far as they exist."""
    rows, columns = layer.geometry.span
    neighbours = []
    if rows > 1:
        neighbours += [(-1, 0), (1, 0)]
    if columns > 1:
        neighbours += [(0, -1), (0, 1)]
    if not neighbours:
        return layer.offsets.new_zeros(layer.offsets.shape[:2])
    weights = []
    for down, across in neighbours:
        # the element for offset 0 is at row `rows - 1` and column `columns - 1`
        weights.append(layer.offsets[:, :, rows - 1 + down, columns - 1 + across])
    return torch.stack(weights).sum(0)


def ascending(values: Row) -> Row:
    """Return each row in ascending order."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    # on the CPU, numpy sorts 25 times faster than torch
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1))


def outliers(values: Float[Tensor, "*leading token"]) -> Bool[Tensor, "*leading token"]:
    """Return True for values above their row's median + 5 median absolute deviations.

    They also exceed the median by 0.01 %: equal values differ by rounding.
    """
    middle = median(values)[..., None]
    deviation = median((values - middle).abs())[..., None]
    limit = torch.maximum(DEVIATIONS * deviation, _ROUNDING * middle.abs())
    return values - middle > limit


def median(values: Float[Tensor, "*leading token"]) -> Float[Tensor, "*leading"]:
    """Return the median of each row.

    For an even number of values it is the mean of the two in the middle. torch.median takes the
    lower of the two.
    """
    ordered = ascending(values)
    size = values.shape[-1]
    return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2


# By name of the statistic. Functions of Rows return one number per row, those of PatchRows one per
# image and head, those of TokenNorms one per image.
FUNCTIONS: Final[dict[str, Callable[[Any], Tensor]]] = {
    "entropy": lambda rows: rows.entropy,
    "normalised_entropy": normalised_entropy,
    "effective_keys": lambda rows: rows.entropy.exp(),
    "hoyer": hoyer,
    "gini": gini,
    "distance": distance,
    "self_mass": lambda layer: layer.mean(layer.on_patches_in_image.diagonal(dim1=-2, dim2=-1)),
    "neighbour_mass": neighbour_mass,
    "cls_mass": lambda layer: layer.received[..., list(layer.geometry.cls)].sum(-1),
    "register_mass": lambda layer: layer.received[..., list(layer.geometry.registers)].sum(-1),
    "prefix_mass": lambda layer: layer.received[..., : layer.geometry.prefix].sum(-1),
    "sinks": lambda layer: layer.sinks.sum(-1).to(layer.received.dtype),
    "sink_mass": lambda layer: (layer.received_of_all * layer.sinks).sum(-1),
    "energy": lambda layer: layer.mean_sum(layer.on_patches_in_image.square().sum((-2, -1))),
    "cls_self_mass": lambda layer: layer.cls_row[..., layer.geometry.cls[0]],
    "cls_register_mass": lambda layer: layer.cls_row[..., list(layer.geometry.registers)].sum(-1),
    "token_norm": lambda tokens: median(tokens.norms),
    "greatest_norm": lambda tokens: tokens.norms.amax(-1),
    "high_norm_patches": lambda tokens: tokens.high[:, tokens.prefix :].sum(-1),
    "high_norm_prefix": lambda tokens: tokens.high[:, : tokens.prefix].sum(-1),
}
