"""ROAD (Rong 2022): removal whose holes are filled from their surroundings, so that their shape tells nothing.

Each removed pixel is the weighted mean of its eight neighbours (1/6 beside, 1/12 across; at the image's edge, of those
that are there), with a little noise: the paper's noisy linear imputation. Its linear system is solved for many images
at once by conjugate gradients, which the system allows: it is symmetric, and positive where any pixel is known.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness import Faithfulness, Plan, curves_of
from vitlens.analysis.masking import Cells, once, pixel_masks, resized
from vitlens.analysis.resampled import AnyMaps, removal_grid
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images, Labels

SHARES = (0.2, 0.4, 0.6, 0.8)  # of the patches removed
NOISE = 0.01  # standard deviation, of pixels in [0, 1]
TOLERANCE = 1e-3  # of pixels in [0, 1]: a quarter of one step of an 8-bit image
_KERNEL = ((1 / 12, 1 / 6, 1 / 12), (1 / 6, 0.0, 1 / 6), (1 / 12, 1 / 6, 1 / 12))
_ROUNDS = 2000
_LOOK_EVERY = 8  # rounds between looks at the residual, each of which waits for the device

Holes = Bool[Tensor, "batch 1 height width"]


def road(
    specimen: Specimen,
    images: Images,
    targets: Labels,
    maps: Sequence[AnyMaps],
    *,
    shares: Sequence[float] = SHARES,
    grid: Cells | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Faithfulness, ...]:
    """The curves of several methods' maps with imputed holes, at these shares of the patches removed.

    Arguments as for faithfulness; its gaps are ROAD's LeRF minus MoRF (grad-cam's combined score is half of it). Raises
    InputError for a share that is not between 0 and 1.
    """
    cells = grid or removal_grid(specimen)
    patches = cells[0] * cells[1]
    counts = torch.tensor(sorted({round(share * patches) for share in shares}))
    if not len(counts) or not 0 <= int(counts[0]) <= int(counts[-1]) < patches:
        raise InputError(f"expected shares from 0 to below 1 of {patches} patches, found {list(shares)}")
    size = batch_size or fitting_batch_size(specimen)

    @torch.no_grad()
    def answer(some: Images, which: Tensor, removed: Tensor) -> Tensor:
        some = resized(specimen, some)
        place, back = once(which, removed)
        found = []
        with evaluating(specimen):
            for few in place.split(size):
                few = few.to(removed.device)
                holes = pixel_masks(removed[few], cells, specimen.input_size)
                found.append(specimen(imputed(some[which[few]], holes, seed=seed)).float())
        return torch.cat(found)[back.to(removed.device)]

    return curves_of(images, targets, maps, Plan(cells, counts, len(specimen.classes), seed), answer, advance=advance)


def imputed(
    images: Images, holes: Holes, *, noise: float = NOISE, seed: int = 0, tolerance: float = TOLERANCE
) -> Images:
    """Images with their holes filled from what surrounds them, and noise of that standard deviation in the holes.

    The noise is the same field for every image, so that none depends on its neighbours in the batch. tolerance: the
    largest residual that a pixel may have in the system. Raises InputError for an image that is all hole.
    """
    if bool(holes.flatten(1).all(1).any()):
        raise InputError("expected images of which something is left, found one that is removed whole")
    filled = _solved(images, holes, tolerance)
    grain = torch.randn(1, *images.shape[1:], generator=torch.Generator().manual_seed(seed)).to(images)
    return torch.where(holes, (filled + noise * grain).clamp(0, 1), images)


def _solved(images: Images, holes: Holes, tolerance: float) -> Images:
    """Conjugate gradients on (D - W) x = W known, in the holes alone; every image and channel by itself."""
    inside = holes.to(images.dtype)
    weight = _neighbours(torch.ones_like(inside))  # what the neighbours that are there weigh together
    x = inside * _rough(images, 1 - inside)
    known = _neighbours(images * (1 - inside))
    residual = inside * (known + _neighbours(x) - weight * x)
    step, square = residual, _squares(residual)
    for round_ in range(_ROUNDS):
        if round_ % _LOOK_EVERY == 0 and residual.abs().max() <= tolerance * 0.1:
            break
        image = inside * (weight * step - _neighbours(step))
        length = square / (step * image).sum((2, 3), keepdim=True).clamp_min(1e-30)
        x, residual = x + length * step, residual - length * image
        before, square = square, _squares(residual)
        step = residual + square / before.clamp_min(1e-30) * step
    return x


def _neighbours(values: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch channels height width"]:
    """The weighted sum of each pixel's neighbours, nothing beyond the edge."""
    kernel = torch.tensor(_KERNEL, dtype=values.dtype, device=values.device)
    return F.conv2d(values, kernel.expand(values.shape[1], 1, 3, 3), padding=1, groups=values.shape[1])


def _squares(values: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch channels 1 1"]:
    return (values**2).sum((2, 3), keepdim=True)


def _rough(images: Images, known: Float[Tensor, "batch 1 height width"]) -> Images:
    """A first guess: holes filled from ever coarser means of what is known, so that few rounds are left to do."""
    height, width = images.shape[-2:]
    if bool(known.flatten(1).all()) or min(height, width) < 2:
        return images
    share = F.avg_pool2d(known, 2, ceil_mode=True)
    means = F.avg_pool2d(images * known, 2, ceil_mode=True) / share.clamp_min(1e-6)
    coarse = _rough(means, (share > 0).to(images.dtype))
    large = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    return torch.where(known > 0, images, large)
