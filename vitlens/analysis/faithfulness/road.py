"""ROAD's imputation (Rong 2022): removed pixels follow from their surroundings, so that a mask's shape reveals nothing.

Noisy linear imputation: each removed pixel is the weighted mean of its eight neighbours (1/6 for the four adjacent,
1/12 for the four diagonal ones; at the image's edge, of those that exist), plus a little noise. The linear system of
many images is solved at once by conjugate gradients, as it is symmetric, and positive definite where any pixel is
known. Each iteration is preconditioned by one multigrid cycle, so that the number of iterations does not grow with the
size of the holes.
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
_ENLARGE = (0.25, 0.75, 0.75, 0.25)  # linear interpolation between the centres of cells twice as wide
_ROUNDS = 500
_AT_ONCE = 2**20  # unknowns solved for at once: with an iteration's other tensors they fit a processor's cache
_COARSEST = 8  # pixels a side up to which no coarser grid is made
_SWEEPS = 8  # on the coarsest grid

Holes = Bool[Tensor, "batch 1 height width"]
Grid = Float[Tensor, "batch channels height width"]
OneEach = Float[Tensor, "batch 1 height width"]


def imputed(images: Images, holes: Holes, *, noise: float = NOISE, seed: int = 0) -> Images:
    """Images with their holes imputed from the surrounding pixels to TOLERANCE, and noise of this standard deviation in
    the holes, the same for every image, so that results do not depend on the batch.

    Raises InputError for an image without any pixel left.
    """
    if bool(holes.flatten(1).all(1).any()):
        raise InputError("expected images with some pixels left, found one without any")
    at_once = max(1, _AT_ONCE // images[0].numel()) if images.device.type == "cpu" else len(images)
    filled = torch.cat([_solved(*part) for part in zip(images.split(at_once), holes.split(at_once))])
    grain = torch.randn(1, *images.shape[1:], generator=torch.Generator().manual_seed(seed)).to(images)
    return torch.where(holes, (filled + noise * grain).clamp(0, 1), images)


@dataclass(frozen=True)
class _Level:
    """One grid of the multigrid cycle: inside is 1 in holes; weight: the sum of the weights of existing neighbours."""

    inside: OneEach
    weight: Float[Tensor, "1 1 height width"]

    def times(self, values: Grid) -> Grid:
        """(D - W) applied to values, in the holes; values must be 0 outside."""
        return self.inside * (self.weight * values - _neighbours(values))


def _solved(images: Images, holes: Holes) -> Images:
    """Conjugate gradients on (D - W) x = W known, in the holes only; separately for every image and channel."""
    # the grid and coarser ones, halved while both sides are even; a coarse cell is a hole if all of it is
    inside = [holes.to(images.dtype)]
    while min(size := inside[-1].shape[-2:]) > _COARSEST and not any(side % 2 for side in size):
        inside.append((F.avg_pool2d(inside[-1], 2) == 1).to(images.dtype))
    levels = [_Level(each, _neighbours(torch.ones_like(each[:1]))) for each in inside]
    fine = levels[0]
    x = fine.inside * _rough(images, 1 - fine.inside)
    residual = fine.inside * _neighbours(images * (1 - fine.inside)) - fine.times(x)
    better = _cycle(levels, residual)
    step, square = better, _dot(residual, better)
    for _ in range(_ROUNDS):
        if better.abs().max() <= TOLERANCE / 2:  # the change by a cycle estimates the error
            break
        image = fine.times(step)
        length = square / _dot(step, image).clamp_min(1e-30)
        x, residual = x + length * step, residual - length * image
        better = _cycle(levels, residual)
        before, square = square, _dot(residual, better)
        step = better + square / before.clamp_min(1e-30) * step
    return x


def _cycle(levels: Sequence[_Level], residual: Grid) -> Grid:
    """One multigrid V-cycle for the error of a residual: symmetric, as conjugate gradients require.

    A Jacobi step, a division by the weight, removes at least two thirds of the error that a coarser grid cannot
    represent.
    """
    level, coarser = levels[0], levels[1:]
    x = residual / level.weight
    if not coarser:
        for _ in range(_SWEEPS):
            x = x + (residual - level.times(x)) / level.weight
        return x
    line = torch.tensor(_ENLARGE, dtype=residual.dtype, device=residual.device)
    kernel, channels = torch.outer(line, line).expand(residual.shape[1], 1, 4, 4), residual.shape[1]

    def larger(values: Grid, groups: int = channels) -> Grid:  # by 2, linearly interpolated; zero beyond the edge
        return F.conv_transpose2d(values, kernel[:groups], stride=2, padding=1, groups=groups)

    shares = larger(torch.ones_like(level.inside[:1, :, ::2, ::2]), 1)  # below 1 at the image's edge
    left = (residual - level.times(x)) / shares
    smaller = F.conv2d(left, kernel, stride=2, padding=1, groups=channels)  # the transpose, as symmetry requires
    x = x + level.inside * larger(_cycle(coarser, smaller * coarser[0].inside)) / shares
    return x + (residual - level.times(x)) / level.weight


def _neighbours(values: Grid) -> Grid:
    """The weighted sum of each pixel's neighbours, zero beyond the edge.

    The kernel is (1, 2, 1) x (1, 2, 1) / 12 without its middle, computed separably, as a depthwise convolution is many
    times slower on CPUs.
    """
    wide = F.pad(values, (1, 1, 1, 1))
    down = (wide[..., :-2, :] + wide[..., 2:, :]).add_(wide[..., 1:-1, :], alpha=2)
    both = (down[..., :-2] + down[..., 2:]).add_(down[..., 1:-1], alpha=2)
    return both.sub_(values, alpha=4).div_(12)


def _dot(first: Grid, second: Grid) -> Float[Tensor, "batch channels 1 1"]:
    return (first * second).sum((2, 3), keepdim=True)


def _rough(images: Images, known: OneEach) -> Images:
    """An initial guess: holes filled from means of known pixels at successively coarser resolutions."""
    height, width = images.shape[-2:]
    if bool(known.flatten(1).all()) or min(height, width) < 2:
        return images
    share = F.avg_pool2d(known, 2, ceil_mode=True)
    means = F.avg_pool2d(images * known, 2, ceil_mode=True) / share.clamp_min(1e-6)
    coarse = _rough(means, (share > 0).to(images.dtype))
    large = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    return torch.where(known > 0, images, large)
