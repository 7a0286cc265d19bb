"""RISE (Petsiuk 2018): the mean of random soft masks, weighted by the target's probability for the masked image."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.attribution.defaults import MASKS
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps

_CELLS = 7  # along each side of a mask before it is enlarged, as in the paper
_VISIBLE = 0.5  # share of cells that stay visible


def rise(model: Model, images: Images, targets: Labels, *, masks: int = MASKS, seed: int = DEFAULT_SEED) -> Maps:
    """The target's mean probability over the masks in which a pixel is visible, (batch, height, width), a fraction.

    Every image gets the same masks: 7 x 7 cells, each visible with probability one half, enlarged bilinearly and
    shifted at random; masked pixels take the model's mean colour, which its normalisation turns into 0. One forward
    per mask and image. Raises InputError for less than one mask.
    """
    if masks < 1:
        raise InputError(f"expected masks of at least 1, found {masks}")
    size = (int(images.shape[2]), int(images.shape[3]))
    at_once = max(1, fitting_batch_size(model) // len(images))
    generator, covered = torch.Generator().manual_seed(seed), images.new_zeros(size)
    total = images.new_zeros(len(images), *size)
    with evaluating(model), torch.no_grad():
        for start in range(0, masks, at_once):
            count = min(at_once, masks - start)
            visible = torch.stack([_mask(size, generator) for _ in range(count)]).to(images)
            masked = model.mean + visible[:, None, None] * (images - model.mean)  # masks, batch, 3, height, width
            probabilities = model(masked.flatten(0, 1)).float().softmax(-1)
            scores = probabilities.gather(1, targets.repeat(count)[:, None]).view(count, -1)
            total += torch.einsum("mb,mhw->bhw", scores.to(visible), visible)
            covered += visible.sum(0)
    # the paper divides by the expected share of visible pixels; the actual share leaves no pattern of uneven masks
    return total / covered.clamp_min(torch.finfo(covered.dtype).tiny)


def _mask(size: tuple[int, int], generator: torch.Generator) -> Float[Tensor, "height width"]:
    """One soft mask, cropped at random from one that is a cell larger each way."""
    cell = [-(-side // _CELLS) for side in size]
    coarse = (torch.rand(1, 1, _CELLS, _CELLS, generator=generator) < _VISIBLE).float()
    larger = [(_CELLS + 1) * side for side in cell]
    fine = F.interpolate(coarse, size=larger, mode="bilinear", align_corners=False)[0, 0]
    top, left = (int(torch.randint(side, (1,), generator=generator)) for side in cell)
    return fine[top : top + size[0], left : left + size[1]]
