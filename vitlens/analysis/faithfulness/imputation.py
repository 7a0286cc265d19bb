"""Noisy linear imputation (ROAD, Rong 2022): fill holes of images from the surrounding pixels.

The linear system is solved by conjugate gradients, preconditioned by multigrid cycles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.shapes import Images

NOISE = 0.01  # standard deviation of the noise, for pixels in [0, 1]
TOLERANCE = 1e-3  # largest error of a pixel in [0, 1]: a quarter of one step of an 8-bit image
# linear interpolation between the centres of cells twice as wide
_ENLARGE = (0.25, 0.75, 0.75, 0.25)
_MOST_ITERATIONS = 500
# unknowns solved for at once: with the other tensors of an iteration they fit a processor's cache
_AT_ONCE = 2**20
_COARSEST = 8  # a grid with so many pixels along its shorter side is not halved again
_SWEEPS = 8  # Jacobi steps on the coarsest grid
_TINY = 1e-30  # avoids a division by 0

Holes = Bool[Tensor, "batch 1 height width"]  # True for pixels to fill
Grid = Float[Tensor, "batch channels height width"]
Plane = Float[Tensor, "batch 1 height width"]


def impute(images: Images, holes: Holes, *, noise: float = NOISE, seed: int = 0) -> Images:
    """Return images with their holes imputed from the surrounding pixels to TOLERANCE.

    Each pixel of a hole is the weighted mean of its eight neighbours: 1/6 for the four adjacent
    ones and 1/12 for the four diagonal ones. At the edge of the image, it is the mean of those that
    exist. Then noise is added in the holes. It is the same for every image, so that results do not
    depend on the batch.

    The linear system of many images is solved at once by conjugate gradients, as it is symmetric,
    and positive definite where any pixel is known. Each iteration is preconditioned by one
    multigrid cycle, so that the number of iterations does not grow with the size of the holes.

    noise: the standard deviation of the noise.

    Raises InputError for an image without any pixel left.
    """
    if bool(holes.flatten(1).all(1).any()):
        raise InputError("expected images with some pixels left, found one without any")
    at_once = len(images)
    if images.device.type == "cpu":
        at_once = max(1, _AT_ONCE // images[0].numel())
    parts = zip(images.split(at_once), holes.split(at_once))
    filled = torch.cat([_solve(part, part_holes) for part, part_holes in parts])
    generator = torch.Generator().manual_seed(seed)
    grain = torch.randn(1, *images.shape[1:], generator=generator).to(images)
    return torch.where(holes, (filled + noise * grain).clamp(0, 1), images)


@dataclass(frozen=True)
class _Level:
    """One grid of the multigrid cycle, with the matrix D - W of the linear system.

    W sums the weighted neighbours of a pixel. D is diagonal, with the sum of their weights.

    inside: 1 in holes, else 0.
    weight: the sum of the weights of the neighbours of each pixel that exist, the diagonal of D.
    """

    inside: Plane
    weight: Float[Tensor, "1 1 height width"]

    def times(self, values: Grid) -> Grid:
        """Return D - W applied to values, in the holes. Values must be 0 outside."""
        return self.inside * (self.weight * values - _neighbours(values))


def _solve(images: Images, holes: Holes) -> Images:
    """Solve (D - W) x = W k in the holes by conjugate gradients, for every image and channel.

    k are the pixels outside the holes. The result x is 0 outside the holes.
    """
    levels = _levels(holes.to(images.dtype))
    fine = levels[0]
    is_known = 1 - fine.inside
    x = fine.inside * _initial_guess(images, is_known)
    residual = fine.inside * _neighbours(images * is_known) - fine.times(x)
    # the preconditioned residual, an estimate of the error of x
    correction = _cycle(levels, residual)
    direction = correction
    product = _dot(residual, correction)
    for _ in range(_MOST_ITERATIONS):
        if correction.abs().max() <= TOLERANCE / 2:
            break
        fall_of_residual = fine.times(direction)  # how the residual falls with a step of length 1
        length = product / _dot(direction, fall_of_residual).clamp_min(_TINY)
        x = x + length * direction
        residual = residual - length * fall_of_residual
        correction = _cycle(levels, residual)
        previous_product = product
        product = _dot(residual, correction)
        direction = correction + product / previous_product.clamp_min(_TINY) * direction
    return x


def _levels(inside: Plane) -> list[_Level]:
    """Return the grid and coarser ones, halved while both sides are even.

    A coarse cell is a hole if all of it is.
    """
    levels = [_level(inside)]
    while True:
        height, width = inside.shape[-2:]
        is_even = height % 2 == 0 and width % 2 == 0
        if min(height, width) <= _COARSEST or not is_even:
            return levels
        inside = (F.avg_pool2d(inside, 2) == 1).to(inside.dtype)
        levels.append(_level(inside))


def _level(inside: Plane) -> _Level:
    ones = torch.ones_like(inside[:1])
    return _Level(inside, weight=_neighbours(ones))


def _cycle(levels: Sequence[_Level], residual: Grid) -> Grid:
    """Estimate the error x of a residual, (D - W) x = residual, by one multigrid V-cycle.

    The cycle is a Jacobi step, a correction by the coarser grids, and a Jacobi step. A Jacobi step
    divides the residual by the weight. It removes at least two thirds of the error that a coarser
    grid cannot represent. The cycle is symmetric, as conjugate gradients require.
    """
    level = levels[0]
    coarser = levels[1:]
    x = residual / level.weight
    if not coarser:
        for _ in range(_SWEEPS):
            x = x + (residual - level.times(x)) / level.weight
        return x
    # Interpolation is _enlarge(.) / shares, and restriction its transpose, _reduce(. / shares). So
    # the cycle stays symmetric.
    # shares: the sum of the interpolation weights of each pixel, below 1 at the edge of the image
    coarse_ones = torch.ones_like(level.inside[:1, :, ::2, ::2])
    shares = _enlarge(coarse_ones)
    coarse_residual = _reduce((residual - level.times(x)) / shares)
    coarse_correction = _cycle(coarser, coarse_residual * coarser[0].inside)
    x = x + level.inside * _enlarge(coarse_correction) / shares
    return x + (residual - level.times(x)) / level.weight


def _enlarge(values: Grid) -> Grid:
    """Return values enlarged by 2, linearly interpolated; zero beyond the edge."""
    channels = values.shape[1]
    return F.conv_transpose2d(
        values, _interpolation_kernel(values), stride=2, padding=1, groups=channels
    )


def _reduce(values: Grid) -> Grid:
    """Return values reduced by 2, by the transpose of `_enlarge`, as symmetry requires."""
    channels = values.shape[1]
    return F.conv2d(values, _interpolation_kernel(values), stride=2, padding=1, groups=channels)


def _interpolation_kernel(values: Grid) -> Float[Tensor, "channels 1 4 4"]:
    line = torch.tensor(_ENLARGE, dtype=values.dtype, device=values.device)
    return torch.outer(line, line).expand(values.shape[1], 1, 4, 4)


def _neighbours(values: Grid) -> Grid:
    """Return the weighted sum of the neighbours of each pixel, zero beyond the edge.

    The kernel is (1, 2, 1) x (1, 2, 1) / 12 without its middle, computed separably, as a depthwise
    convolution is many times slower on CPUs.
    """
    padded = F.pad(values, (1, 1, 1, 1))
    down = (padded[..., :-2, :] + padded[..., 2:, :]).add_(padded[..., 1:-1, :], alpha=2)
    both = (down[..., :-2] + down[..., 2:]).add_(down[..., 1:-1], alpha=2)
    return both.sub_(values, alpha=4).div_(12)


def _dot(first: Grid, second: Grid) -> Float[Tensor, "batch channels 1 1"]:
    return (first * second).sum((2, 3), keepdim=True)


def _initial_guess(images: Images, is_known: Plane) -> Images:
    """Return images with holes filled from means of known pixels.

    A hole is filled from the finest of successively coarser resolutions that has a mean there.
    """
    height, width = images.shape[-2:]
    if bool(is_known.flatten(1).all()) or min(height, width) < 2:
        return images
    share = F.avg_pool2d(is_known, 2, ceil_mode=True)  # of known pixels in each coarse one
    # the smallest share above 0 is a quarter
    means = F.avg_pool2d(images * is_known, 2, ceil_mode=True) / share.clamp_min(1e-6)
    coarse = _initial_guess(means, (share > 0).to(images.dtype))
    large = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    return torch.where(is_known > 0, images, large)
