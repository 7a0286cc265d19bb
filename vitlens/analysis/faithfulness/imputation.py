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

NOISE = 0.01  # standard deviation, of pixels in [0, 1]
TOLERANCE = 1e-3  # of pixels in [0, 1]: a quarter of one step of an 8-bit image
# linear interpolation between the centres of cells twice as wide
_ENLARGE = (0.25, 0.75, 0.75, 0.25)
_MOST_ITERATIONS = 500
# unknowns solved for at once: with the other tensors of an iteration they fit a processor's cache
_AT_ONCE = 2**20
_COARSEST = 8  # pixels a side up to which no coarser grid is made
_SWEEPS = 8  # on the coarsest grid

Holes = Bool[Tensor, "batch 1 height width"]
Grid = Float[Tensor, "batch channels height width"]
OneEach = Float[Tensor, "batch 1 height width"]


def impute(images: Images, holes: Holes, *, noise: float = NOISE, seed: int = 0) -> Images:
    """Return images with their holes imputed from the surrounding pixels to TOLERANCE.

    Noisy linear imputation: each removed pixel is the weighted mean of its eight neighbours (1/6
    for the four adjacent, 1/12 for the four diagonal ones; at the edge of the image, of those that
    exist). Noise of this standard deviation is added in the holes, the same for every image, so
    that results do not depend on the batch.

    The linear system of many images is solved at once by conjugate gradients, as it is symmetric,
    and positive definite where any pixel is known. Each iteration is preconditioned by one
    multigrid cycle, so that the number of iterations does not grow with the size of the holes.
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
    """One grid of the multigrid cycle.

    inside: 1 in holes; weight: the sum of the weights of existing neighbours.
    """

    inside: OneEach
    weight: Float[Tensor, "1 1 height width"]

    def times(self, values: Grid) -> Grid:
        """Return (D - W) applied to values, in the holes; values must be 0 outside."""
        return self.inside * (self.weight * values - _neighbours(values))


def _solve(images: Images, holes: Holes) -> Images:
    """Solve (D - W) x = W known in the holes by conjugate gradients, for every image and channel.

    known: the pixels outside the holes.
    """
    levels = _levels(holes.to(images.dtype))
    fine = levels[0]
    known = 1 - fine.inside
    x = fine.inside * _initial_guess(images, known)
    residual = fine.inside * _neighbours(images * known) - fine.times(x)
    correction = _cycle(levels, residual)
    step = correction
    square = _dot(residual, correction)
    for _ in range(_MOST_ITERATIONS):
        if correction.abs().max() <= TOLERANCE / 2:  # the change by a cycle estimates the error
            break
        image = fine.times(step)
        length = square / _dot(step, image).clamp_min(1e-30)
        x = x + length * step
        residual = residual - length * image
        correction = _cycle(levels, residual)
        before = square
        square = _dot(residual, correction)
        step = correction + square / before.clamp_min(1e-30) * step
    return x


def _levels(inside: OneEach) -> list[_Level]:
    """Return the grid and coarser ones, halved while both sides are even.

    A coarse cell is a hole if all of it is.
    """
    levels = [_level(inside)]
    while min(inside.shape[-2:]) > _COARSEST and not any(side % 2 for side in inside.shape[-2:]):
        inside = (F.avg_pool2d(inside, 2) == 1).to(inside.dtype)
        levels.append(_level(inside))
    return levels


def _level(inside: OneEach) -> _Level:
    return _Level(inside, _neighbours(torch.ones_like(inside[:1])))


def _cycle(levels: Sequence[_Level], residual: Grid) -> Grid:
    """Return one multigrid V-cycle for the error of a residual.

    It is symmetric, as conjugate gradients require. A Jacobi step, a division by the weight,
    removes at least two thirds of the error that a coarser grid cannot represent.
    """
    level = levels[0]
    coarser = levels[1:]
    x = residual / level.weight
    if not coarser:
        for _ in range(_SWEEPS):
            x = x + (residual - level.times(x)) / level.weight
        return x
    coarse_ones = torch.ones_like(level.inside[:1, :, ::2, ::2])
    shares = _enlarge(coarse_ones)  # below 1 at the edge of the image
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


def _initial_guess(images: Images, is_known: OneEach) -> Images:
    """Return holes filled from means of known pixels at successively coarser resolutions."""
    height, width = images.shape[-2:]
    if bool(is_known.flatten(1).all()) or min(height, width) < 2:
        return images
    share = F.avg_pool2d(is_known, 2, ceil_mode=True)
    means = F.avg_pool2d(images * is_known, 2, ceil_mode=True) / share.clamp_min(1e-6)
    coarse = _initial_guess(means, (share > 0).to(images.dtype))
    large = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    return torch.where(is_known > 0, images, large)
