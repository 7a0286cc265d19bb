"""Images of a latent, spread over its activations, and where in each image its evidence lies.

The evidence is attributed to the pixels. The patch in which a latent of a deep layer is active need
not be where the image shows what activates it: each token has attended to many patches.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.dictionary.measures import Activity
from vitlens.lens.capture import capture
from vitlens.shapes import Images, Maps

EXEMPLARS: Final = 9  # images of a latent
STEPS: Final = 8  # steps of integrated gradients


def exemplars(activity: Activity, latent: int, count: int = EXEMPLARS) -> list[int]:
    """Return the indices of images at evenly spread ranks of a latent, the largest first.

    They are images in which it is active, all of them if there are at most `count`.
    """
    largest = activity.largest[:, latent]
    active = (largest > 0).nonzero()[:, 0]
    ranked = active[largest[active].argsort(descending=True, stable=True)].tolist()
    if len(ranked) <= count:
        return ranked
    step = (len(ranked) - 1) / (count - 1)
    return [ranked[round(step * place)] for place in range(count)]


def evidence(
    dictionary: Dictionary, images: Images, latents: Sequence[int], *, steps: int = STEPS
) -> Maps:
    """Return what the pixels of each patch add to a latent of each image (batch, rows, columns).

    These are integrated gradients (Sundararajan 2017) of the pre-activations, summed over the
    patches in which the latent is active. They start from an image of one colour, its own mean.
    With many steps, they sum to the difference from that image.

    latents: the latent of each image.
    """
    model = dictionary.model
    images = images.to(model.device)
    numbers = torch.tensor(list(latents), device=model.device)
    latents_of_patches = dictionary.encode(_tokens(dictionary, images).detach())
    is_active = _of_each(latents_of_patches, numbers) > 0  # (batch, patches)
    baseline = images.mean((2, 3), keepdim=True).expand_as(images)
    total = torch.zeros_like(images)
    for step in range(steps):
        share = (step + 0.5) / steps
        mixed = (baseline + share * (images - baseline)).detach().requires_grad_()
        tokens = _tokens(dictionary, mixed)
        # pre-activations above 0 have a gradient also if they are not kept as latents
        autoencoder = dictionary.autoencoder
        pre_activations = autoencoder.pre_activations(autoencoder.normalised(tokens.float()))
        summed = (_of_each(pre_activations, numbers) * is_active).sum()
        (gradient,) = torch.autograd.grad(summed, mixed)
        total += gradient / steps
    maps = (total * (images - baseline)).sum(1, keepdim=True)
    rows, columns = model.layout.grid
    pixels_per_patch = maps.shape[2] * maps.shape[3] / (rows * columns)
    patch_means = F.adaptive_avg_pool2d(maps, (rows, columns))
    return (patch_means * pixels_per_patch)[:, 0].cpu()  # sums


def _tokens(dictionary: Dictionary, images: Images) -> Float[Tensor, "batch patches dim"]:
    return capture(dictionary.model, images, dictionary.patches, graph=True)[dictionary.patches]


def _of_each(latents: Float[Tensor, "batch patches latents"], numbers: Tensor) -> Tensor:
    """Return one latent of each image (batch, patches)."""
    index = numbers[:, None, None].expand(-1, latents.shape[1], 1)
    return latents.gather(2, index)[..., 0]
