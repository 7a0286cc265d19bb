"""Attributions from the gradient of the target's logit with respect to the pixels, (batch, height, width).

Pixels are those in [0, 1] that are handed in: normalisation, and a resize where there is one, are differentiated too.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.defaults import BASELINE, NOISE, SAMPLES, STEPS
from vitlens.attribution.stem import leaf_of, stem_of
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps


def pixel_gradients(model: Model, images: Images, targets: Labels) -> Images:
    """How each image's target logit changes with its pixels. Nothing keeps a gradient, the images least of all."""
    with evaluating(model), torch.enable_grad():
        leaf = leaf_of(model, images)
        logits = model(leaf)
        (gradient,) = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), leaf)
    return gradient


def saliency(model: Model, images: Images, targets: Labels) -> Maps:
    """The largest absolute gradient over the three channels (Simonyan 2014, section 3.1); not signed."""
    return pixel_gradients(model, images, targets).abs().amax(1)


def input_x_gradient(model: Model, images: Images, targets: Labels) -> Maps:
    """Pixel times gradient, summed over the channels: the first-order fall of the logit where a pixel turns black."""
    return (images * pixel_gradients(model, images, targets)).sum(1)


def smoothgrad(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    samples: int = SAMPLES,
    noise: float = NOISE,
    seed: int = DEFAULT_SEED,
) -> Maps:
    """Saliency of the mean gradient over noisy copies of each image (Smilkov 2017).

    noise: standard deviation as a share of the image's range. Every image gets the same draws, so that none depends on
    its neighbours in the batch. Without noise it is saliency.
    """
    if samples < 1:
        raise InputError(f"expected samples of at least 1, found {samples}")
    spread = noise * (images.amax((1, 2, 3)) - images.amin((1, 2, 3)))
    generator, total = torch.Generator().manual_seed(seed), torch.zeros_like(images)
    for count in _in_chunks(samples, model, images):
        draws = torch.stack([torch.randn(images.shape[1:], generator=generator) for _ in range(count)])
        copies = images + spread.view(1, -1, 1, 1, 1) * draws.to(images).unsqueeze(1)  # (count, batch, 3, ...)
        total += _over_copies(model, copies, targets).sum(0)
    return (total / samples).abs().amax(1)


def integrated_gradients(
    model: Model, images: Images, targets: Labels, *, steps: int = STEPS, baseline: float = BASELINE
) -> Maps:
    """Integrated gradients (Sundararajan 2017) from an image of one value to the image, summed over the channels.

    baseline: that value, 0 for black. The integral is Gauss and Legendre's sum of so many steps; what it lacks of
    F(image) - F(baseline) is what `completeness_error` gives.
    """
    if steps < 1:
        raise InputError(f"expected steps of at least 1, found {steps}")
    places, weights = (torch.from_numpy(part).float().to(images) / 2 for part in np.polynomial.legendre.leggauss(steps))
    stem, done = stem_of(model), 0
    with torch.no_grad():
        start, end = stem.values(torch.full_like(images, baseline)), stem.values(images)
    total = torch.zeros_like(end)
    for count in _in_chunks(steps, model, images):
        part = slice(done, done + count)
        shares = (places[part] + 0.5).view(-1, *[1] * end.dim())
        copies = start + shares * (end - start)  # (count, batch, ...)
        gradients = stem.gradients(copies.flatten(0, 1), targets.repeat(count), like=images)
        total += torch.tensordot(weights[part], gradients.unflatten(0, (count, -1)), dims=1)
        done += count
    return ((images - baseline) * stem.carried_back(total, images)).sum(1)


def completeness_error(
    model: Model, images: Images, targets: Labels, maps: Maps, *, baseline: float = BASELINE
) -> Float[Tensor, " batch"]:
    """What each map of integrated gradients has beyond F(image) - F(baseline), or lacks of it, in logits, signed."""
    error: Tensor = maps.sum((1, 2)) - logit_gain(model, images, targets, baseline=baseline)
    return error


def logit_gain(model: Model, images: Images, targets: Labels, *, baseline: float = BASELINE) -> Float[Tensor, " batch"]:
    """F(image) - F(baseline): what the target's logit gains over an image of one value."""
    empty = torch.full_like(images, baseline)
    with evaluating(model), torch.no_grad():
        logits, without = (model(batch).gather(1, targets[:, None])[:, 0].float() for batch in (images, empty))
    gain: Tensor = logits - without
    return gain


def _over_copies(
    model: Model, copies: Float[Tensor, "copies batch 3 height width"], targets: Labels
) -> Float[Tensor, "copies batch 3 height width"]:
    """The gradients of several copies of a batch in one pass."""
    flat = pixel_gradients(model, copies.flatten(0, 1), targets.repeat(len(copies)))
    gradients: Tensor = flat.unflatten(0, copies.shape[:2])
    return gradients


def _in_chunks(total: int, model: Model, images: Images) -> Iterator[int]:
    """How many copies of the batch fit into one pass with its gradients, until there have been so many."""
    count = max(1, fitting_batch_size(model) // BACKWARD // len(images))
    for start in range(0, total, count):
        yield min(count, total - start)
