"""Norms of perturbations: length, steepest step, projection and random draw, shared by all attacks.

Epsilons are in pixel units, pixels in [0, 1]. Every function takes perturbations (batch, 3, height,
width) and one epsilon per image.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from vitlens.attacks.registry import NormName
from vitlens.data.draws import uniform

Change = Float[Tensor, "batch 3 height width"]  # adversarial image minus clean image
PerImage = Float[Tensor, " batch"]

# L2 changes are projected slightly inside the ball: their length must not exceed epsilon by the
# rounding error of a sum of many squares
_INSIDE = 1 - 1e-6
# added to draws, which are multiples of 2^-24: the normal quantile of 0 is infinite
_HALF_STEP = 2.0**-25


@dataclass(frozen=True)
class Norm:
    """One norm.

    length: returns the length of each change.
    steepest: takes gradients and returns the steps of length 1 that increase the loss most.
    project: returns the nearest change within epsilon.
    draw: returns a random change of length at most 1 for each key, in the shape of the images.
    """

    name: NormName
    length: Callable[[Change], PerImage]
    steepest: Callable[[Change], Change]
    project: Callable[[Change, PerImage], Change]
    draw: Callable[[Int[Tensor, " batch"], Change], Change]


def per_pixel(values: Shaped[Tensor, " batch"]) -> Shaped[Tensor, "batch 1 1 1"]:
    """Return one value per image, shaped to broadcast over pixels."""
    return values[:, None, None, None]


def _largest(change: Change) -> PerImage:
    return change.flatten(1).abs().amax(1)


def _euclidean(change: Change) -> PerImage:
    length: Tensor = change.flatten(1).square().sum(1).sqrt()
    return length


def _unit(change: Change) -> Change:
    smallest = torch.finfo(change.dtype).tiny
    # scaled first to a largest value of 1, because squares of numbers such as 1e-30 underflow
    scaled = change / per_pixel(_largest(change).clamp_min(smallest))
    return scaled / per_pixel(_euclidean(scaled).clamp_min(smallest))


def _clamp(change: Change, epsilon: PerImage) -> Change:
    bound = per_pixel(epsilon)
    return change.clamp(-bound, bound)


def _scale_down(change: Change, epsilon: PerImage) -> Change:
    length = _euclidean(change).clamp_min(torch.finfo(change.dtype).tiny)
    return change * per_pixel((epsilon * _INSIDE / length).clamp_max(1))


def _uniform_in_cube(keys: Int[Tensor, " batch"], like: Change) -> Change:
    draws: Tensor = (2 * uniform(keys, like[0].numel(), stream=1) - 1).view(like.shape)
    return draws.to(like.dtype)


def _uniform_in_ball(keys: Int[Tensor, " batch"], like: Change) -> Change:
    """Draw uniformly in the Euclidean ball: a direction from normal draws, and a radius."""
    size = like[0].numel()
    shares = uniform(keys, size, stream=2) + _HALF_STEP
    direction = _unit(torch.erfinv(2 * shares - 1).view(like.shape).to(like.dtype))
    radius = uniform(keys, 1, stream=3)[:, 0].to(like.dtype) ** (1 / size)
    return direction * per_pixel(radius)


def _share_changed(change: Change) -> PerImage:
    """Return the share of pixels with any change."""
    share: Tensor = (change != 0).any(1).flatten(1).to(change.dtype).mean(1)
    return share


LINF: Final = Norm(
    name="linf", length=_largest, steepest=torch.sign, project=_clamp, draw=_uniform_in_cube
)
L2: Final = Norm(
    name="l2", length=_euclidean, steepest=_unit, project=_scale_down, draw=_uniform_in_ball
)
PATCH: Final = Norm(
    name="patch",
    length=_share_changed,
    steepest=torch.sign,
    project=lambda change, _epsilon: change.clamp(-1, 1),
    draw=_uniform_in_cube,
)
NORMS: Final[Mapping[NormName, Norm]] = MappingProxyType(
    {norm.name: norm for norm in (LINF, L2, PATCH)}
)
