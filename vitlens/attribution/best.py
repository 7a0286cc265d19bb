"""`best`: a class-specific map of a ViT, combined from three maps and tested on the image.

1. Where is the object? Three maps answer, each with another weakness. Gradient-weighted rollout (G)
covers all layers but separates several objects in view poorly. GradCAM (C) separates them but on
some models points next to the object. HiResCAM with the gradients of LibraGrad (N) lies between the
two. Each is made similar between patches that attend to the same places (S² of the upper two thirds
of the layers, affinity.py) and divided by its mean. The place of the object is their product:

    V = S²G · (S²C⁺ + S²N⁺)

2. Smooth it. R is V, with G once more at a small power. Half of each patch's R is replaced by the
mean over patches with similar tokens at the target layer. The weights of that mean are T, the
softmax of 5 times the cosine of tokens less their mean. The result is blurred a little: along each
axis, B keeps 3/4 of a patch and takes 1/8 of each neighbour.

    R = (V⁶ · G)^⅙ = V · G^⅙
    R' = (4/5 + 1/5 B) (1/2 + 1/2 T) R over its greatest value, applied from right to left

3. Which patches of the object matter? That is e: each patch's share of the first-order change of
the logit, from one step of integrated gradients near a blurred image as the baseline (Sundararajan
2017).

4. There are three candidates, of which the smooth one is the default. Its power p, from 1 to 4,
decides how much the highest patches stand out, not the order of patches.

    smooth: ((R' + 3/2 e)⁺)ᵖ       sharp: V³ · G · (C⁺ + N⁺)       rollout: G

5. Each candidate is tested on the image: the half of the patches that it ranks highest is kept, the
rest is blurred. If this makes the target more probable by MARGIN with another candidate than with
the smooth one, the other is returned.

The functions compute these letters: `_parts` G, C, N and V; `_smooth` R and R'; `token_similarity`
T; `_with_neighbours` B; `effects` e; `_raise_contrast` p.

benchmarks/best_map.md has the sets on which these choices were made, the held-out sets, and the
limits.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.affinity import (
    Affinity,
    patch_attention,
    refine_maps,
    similarity_of,
)
from vitlens.analysis.attention.chain import chained, without_autocast
from vitlens.analysis.attention.methods import gradient_rollout_maps
from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.maps import on_grid
from vitlens.analysis.faithfulness.removal import Variants, substrate_images
from vitlens.attribution.cam import ChannelMaps, gradcam, hirescam, layer_gradients, target_layer
from vitlens.attribution.gradients import pixel_gradients
from vitlens.attribution.refinement import evidence
from vitlens.lens.libra import libra_gradients
from vitlens.models.language_image import class_scores
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

MARGIN: Final = 0.1  # in probability: how much better another candidate than the smooth one must be
_SMOOTH_POWER = 6  # of V in R
_SHARP_POWER = 3  # of V in the sharp candidate
_LEAST_POWER = 1.0  # p of the smooth candidate, at least
_GREATEST_POWER = 4.0  # p of the smooth candidate, at most
# the least spread of the smooth candidate over the N patches: a map with one patch has 1/N, a map
# of equal patches 1
_SPREAD: Final = 0.15
_HALVINGS: Final = 20  # of the interval that holds p
_BLURRED: Final = 0.2  # the share of B in R'
_SHARPNESS: Final = 5.0  # the factor of the cosine in T
_TOKEN_SHARE: Final = 0.5  # the share of T in R'
_EFFECT_WEIGHT: Final = 1.5  # of e, of which absolute values sum to 1; R' is at most 1
# the share of the image in the one at which the gradient of e is taken; the rest is blurred
_UNBLURRED: Final = 0.1
_KEPT: Final = 0.5  # the share of the patches that are kept


@dataclass(frozen=True)
class _Parts:
    """The parts of the candidates, on the grid of patches.

    where: V, the product of maps that were made similar and divided by their means.
    rollout: G as it is, divided by its mean.
    cams: C⁺ + N⁺ as they are, each divided by its mean.
    token_similarity: T.
    """

    where: Maps
    rollout: Maps
    cams: Maps
    token_similarity: Affinity


def best_maps(model: Model, images: Images, targets: Labels) -> Maps:
    """Return the recommended maps (batch, rows, columns) of patches, not negative.

    targets: classes (batch,). A map that no part of the evidence supports is 0. Raises
    UnsupportedError for a model without a chain of attention over one sequence of tokens.
    """
    parts = _parts(model, images, targets)
    effect = effects(model, images, targets)
    with without_autocast(model.device):
        smooth = _smooth(parts, effect)
        sharp = parts.where**_SHARP_POWER * parts.rollout * parts.cams
        candidates = torch.stack([smooth, sharp, parts.rollout])
    probabilities = _probabilities_of_half(model, images, targets, candidates)
    probabilities[0] += MARGIN  # another candidate must be better than the smooth one by this much
    indices = torch.arange(len(images), device=candidates.device)
    best: Maps = candidates[probabilities.argmax(0), indices]
    return best


def _parts(model: Model, images: Images, targets: Labels) -> _Parts:
    layer = target_layer(model)
    chain = chained(model, images, targets=targets, gradient=True, module=layer.module)
    assert chain.seen is not None  # of the target layer, which ran
    output, gradient = chain.seen
    with libra_gradients(model):
        libra = layer_gradients(model, images, targets)
    with torch.no_grad(), without_autocast(model.device):
        patch_calls = [call for call in chain.calls if call.site.kind == "patch"]
        # the lower layers see what any image has; a map must change with the upper ones
        upper_calls = patch_calls[len(patch_calls) // 3 :]
        attention = [patch_attention(call, model.layout) for call in upper_calls]
        similarity = similarity_of(attention).float()
        rollout = gradient_rollout_maps(chain).clamp_min(0).float()
        activations = layer.as_maps(output).float()
        cam = gradcam(activations, layer.as_maps(gradient).float()).clamp_min(0)
        libra_cam = hirescam(libra.activations.float(), libra.gradients.float()).clamp_min(0)
        smooth_cam = evidence(refine_maps(cam, similarity))
        smooth_libra_cam = evidence(refine_maps(libra_cam, similarity))
        smooth_rollout = evidence(refine_maps(rollout, similarity))
        return _Parts(
            where=smooth_rollout * (smooth_cam + smooth_libra_cam),
            rollout=evidence(rollout),
            cams=evidence(cam) + evidence(libra_cam),
            token_similarity=token_similarity(activations),
        )


def token_similarity(tokens: ChannelMaps) -> Affinity:
    """Return T of tokens (batch, dim, rows, columns), the share that each patch takes from others.

    Rows sum to 1.
    """
    flat = tokens.flatten(2)
    unit = F.normalize(flat - flat.mean(2, keepdim=True), dim=1)
    return (_SHARPNESS * (unit.mT @ unit)).softmax(-1)


def effects(model: Model, images: Images, targets: Labels) -> Maps:
    """Return e, each patch's signed share of the first-order change of the logit.

    The change is that from the blurred image to the image. The absolute values of an image sum to
    1, or are all 0.
    """
    blurred = substrate_images(images, SUBSTRATE)
    change = images - blurred
    gradient = pixel_gradients(model, blurred + _UNBLURRED * change, targets)
    changes = on_grid((gradient.float() * change).sum(1), model.layout.grid)
    total = changes.abs().sum((1, 2), keepdim=True)
    return changes / total.clamp_min(torch.finfo(changes.dtype).tiny)


def _smooth(parts: _Parts, effect: Maps) -> Maps:
    """Return the smooth candidate. Letters are those of the module's docstring."""
    # R; V⁶ itself may exceed the largest float32 on grids of 4,096 patches
    root = parts.where * parts.rollout ** (1 / _SMOOTH_POWER)
    mixed = (parts.token_similarity @ root.flatten(1).unsqueeze(-1)).view_as(root)  # T R
    similar = torch.lerp(root, mixed, _TOKEN_SHARE)  # (1/2 + 1/2 T) R
    # B of it: first along the rows, then along the columns
    neighbours = _with_neighbours(_with_neighbours(similar).mT).mT
    blurred = torch.lerp(similar, neighbours, _BLURRED)  # R' before its division
    return _raise_contrast((_unit(blurred) + _EFFECT_WEIGHT * effect).clamp_min(0))


def _unit(maps: Maps) -> Maps:
    """Return each map divided by its greatest value; 0 where it is."""
    return maps / maps.amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)


def _raise_contrast(maps: Maps) -> Maps:
    """Return each map, divided by its greatest value, to the greatest power p with enough spread.

    The spread of values m over N patches is (Σ m)² / (N Σ m²), at least _SPREAD. Without this bound
    a map of few patches would show one or two of them and nothing else. p is found by bisection.
    """
    unit = _unit(maps)
    low = unit.new_full((len(unit), 1, 1), _LEAST_POWER)
    high = torch.full_like(low, _GREATEST_POWER)
    for _ in range(_HALVINGS):  # bisection, as the spread falls with a larger power
        middle = (low + high) / 2
        candidate = unit**middle
        squared_mean = candidate.mean((1, 2), keepdim=True).square()
        mean_square = candidate.square().mean((1, 2), keepdim=True)
        has_spread = squared_mean >= _SPREAD * mean_square
        low = torch.where(has_spread, middle, low)
        high = torch.where(has_spread, high, middle)
    return unit**low


def _with_neighbours(maps: Maps) -> Maps:
    """Return 3/4 of each cell and 1/8 of its left and of its right neighbour.
    Cells at the border count as their missing neighbours.
    """
    from_left = torch.cat([maps[..., [0]], maps[..., :-1]], -1)
    from_right = torch.cat([maps[..., 1:], maps[..., [-1]]], -1)
    return 0.75 * maps + (from_left + from_right) / 8


def _probabilities_of_half(
    model: Model, images: Images, targets: Labels, candidates: Float[Tensor, "candidates batch _ _"]
) -> Float[Tensor, "candidates batch"]:
    """Return the probability of the target with the patches that a candidate ranks highest.

    The share _KEPT of the patches is kept, the rest is blurred.
    """
    count = len(candidates)
    order = candidates.flatten(2).argsort(dim=2, descending=True, stable=True)
    ranks = order.argsort(dim=2)  # 0 for the patch with the highest value
    kept = round(_KEPT * ranks.shape[2])
    removed = (ranks >= kept).flatten(0, 1)
    which = torch.arange(len(images), device=images.device).repeat(count)
    logits = Variants(model, images).logits(which, removed)
    classes = targets.repeat(count)[:, None].to(logits.device)
    probabilities = class_scores(model, logits).gather(1, classes)
    return probabilities.view(count, -1).to(candidates.device)
