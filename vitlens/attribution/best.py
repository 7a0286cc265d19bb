"""`best`: a class-specific map of a ViT, combined from published maps that fail in different ways,
and tested on the image before it is given.

Gradient-weighted rollout (G) covers all layers but separates several objects in view poorly;
GradCAM (C) separates them but on some models points beside the object; HiResCAM with LibraGrad's
gradients (N) lies between the two. Each is made alike between patches that attend alike (S² of the
upper two thirds of the layers, affinity.py) and divided by its mean. Their product V = S²G · (S²C⁺
+ S²N⁺) says where the object is. R = (V⁶ · G)^⅙ is made alike by half once more, between patches of
similar tokens at the target layer (T: the softmax of 5 times the cosine of tokens less their mean),
and blurred a little (B: along each axis 3/4 of a patch and 1/8 of each neighbour). Which of the
object's patches count most is another question: e is each patch's share of the logit's first-order
change, from one step of integrated gradients near a blurred image as the baseline (Sundararajan
2017). There are three candidates:

    smooth: ((R' + 3/2 e)⁺)ᵖ with R' = (4/5 + 1/5 B) (1/2 + 1/2 T) R over its greatest value
    sharp: V³ · G · (C⁺ + N⁺)       rollout: G

The smooth one is given, unless the image says otherwise: each candidate's higher half of the
patches is kept, the rest is blurred, and where the target is more probable by MARGIN with those of
another one, that one is given. The power p, from 1 to 4, decides how much the highest patches stand
out, not the order of patches (_contrasted). benchmarks/best_map.md has the sets that the choice of
all this looked at, those kept aside, and what is not reached.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.affinity import Affinity, patch_attention, refined, similarity_of
from vitlens.analysis.attention.chain import chained, without_autocast
from vitlens.analysis.attention.methods import gradient_rollout_maps
from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.maps import on_grid
from vitlens.analysis.faithfulness.removal import Variants, substrate_images
from vitlens.attribution.cam import ChannelMaps, gradcam, hirescam, layer_gradients, target_layer
from vitlens.attribution.gradients import pixel_gradients
from vitlens.attribution.refinement import evidence
from vitlens.lens.libra import libra_gradients
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

MARGIN: Final = 0.1  # in probability: how much better another candidate than the smooth one must be
_SMOOTH_POWER = 6  # of V
_SHARP_POWER = 3  # of V
_LEAST_POWER = 1.0  # of the smooth map
_GREATEST_POWER = 4.0  # of the smooth map
# of its values over the patches: at 1/N one patch alone is not 0, at 1 all are equal
_SPREAD: Final = 0.15
_HALVINGS: Final = 20  # of the interval that holds the power
_BLURRED: Final = 0.2  # the share of B
_SHARPNESS: Final = 5.0  # of T: by what the cosine is multiplied
_ALIKE: Final = 0.5  # the share of T
_EFFECT_WEIGHT: Final = 1.5  # of e, whose absolute values sum to 1, beside R', which is at most 1
# the share of the image in the one at which the gradient of e is taken; the rest is blurred
_UNBLURRED: Final = 0.1
_KEPT: Final = 0.5  # the share of the patches that are kept


@dataclass(frozen=True)
class _Parts:
    """On the grid of patches; all but V and T are divided by their means."""

    where: Maps  # V
    rollout: Maps  # G, not smoothed, as the next
    agreed: Maps  # C⁺ + N⁺
    alike: Affinity  # T


def best_maps(model: Model, images: Images, targets: Labels) -> Maps:
    """Return the recommended maps (batch, rows, columns) of patches, for target classes (batch,);
    not negative.

    A map that no part of the evidence supports is 0. Raises UnsupportedError for a model without a
    chain of attention over one sequence of tokens.
    """
    parts = _parts(model, images, targets)
    effect = effects(model, images, targets)
    with without_autocast(model.device):
        smooth = _smooth(parts, effect)
        candidates = torch.stack(
            [smooth, parts.where**_SHARP_POWER * parts.rollout * parts.agreed, parts.rollout]
        )
    kept = _kept(model, images, targets, candidates)
    kept[0] += MARGIN
    found: Maps = candidates[kept.argmax(0), torch.arange(len(images), device=candidates.device)]
    return found


def _parts(model: Model, images: Images, targets: Labels) -> _Parts:
    layer = target_layer(model)
    chain = chained(model, images, targets=targets, gradient=True, module=layer.module)
    assert chain.seen is not None  # of the target layer, which ran
    output, gradient = chain.seen
    with libra_gradients(model):
        libra = layer_gradients(model, images, targets)
    with torch.no_grad(), without_autocast(model.device):
        patch = [call for call in chain.calls if call.site.kind == "patch"]
        upper = patch[
            len(patch) // 3 :
        ]  # the lower ones see what any image has; a map must change with the upper
        similarity = similarity_of([patch_attention(call, model.layout) for call in upper]).float()
        rollout = gradient_rollout_maps(chain).clamp_min(0).float()
        cams = (
            gradcam(layer.as_maps(output).float(), layer.as_maps(gradient).float()).clamp_min(0),
            hirescam(libra.activations.float(), libra.gradients.float()).clamp_min(0),
        )
        first, second = (evidence(refined(cam, similarity)) for cam in cams)
        where = evidence(refined(rollout, similarity)) * (first + second)
        alike = alike_tokens(layer.as_maps(output).float())
    return _Parts(where, evidence(rollout), evidence(cams[0]) + evidence(cams[1]), alike)


def alike_tokens(tokens: ChannelMaps) -> Affinity:
    """T of tokens (batch, dim, rows, columns): how much each patch takes from each other one; rows
    sum to 1.
    """
    flat = tokens.flatten(2)
    unit = F.normalize(flat - flat.mean(2, keepdim=True), dim=1)
    return (_SHARPNESS * (unit.mT @ unit)).softmax(-1)


def effects(model: Model, images: Images, targets: Labels) -> Maps:
    """e: each patch's share of the logit's first-order change from the blurred image to the image,
    signed.

    The absolute values of an image sum to 1, or are all 0.
    """
    blurred = substrate_images(images, SUBSTRATE)
    change = images - blurred
    gradient = pixel_gradients(model, blurred + _UNBLURRED * change, targets)
    found = on_grid((gradient.float() * change).sum(1), model.layout.grid)
    return found / found.abs().sum((1, 2), keepdim=True).clamp_min(torch.finfo(found.dtype).tiny)


def _smooth(parts: _Parts, effect: Maps) -> Maps:
    """Return the smooth candidate."""
    root = (parts.where**_SMOOTH_POWER * parts.rollout) ** (1 / _SMOOTH_POWER)
    alike = torch.lerp(root, (parts.alike @ root.flatten(1).unsqueeze(-1)).view_as(root), _ALIKE)
    blurred = torch.lerp(alike, _with_neighbours(_with_neighbours(alike).mT).mT, _BLURRED)
    return _contrasted((_unit(blurred) + _EFFECT_WEIGHT * effect).clamp_min(0))


def _unit(maps: Maps) -> Maps:
    """Return each map divided by its greatest value; 0 where it is."""
    return maps / maps.amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)


def _contrasted(maps: Maps) -> Maps:
    """Return each map, divided by its greatest value, to the greatest of these powers with a spread
    of at least _SPREAD.

    The spread of values m over N patches is (Σ m)² / (N Σ m²). Without this bound a map of few
    patches would show one or two of them and nothing else.
    """
    unit = _unit(maps)
    low = unit.new_full((len(unit), 1, 1), _LEAST_POWER)
    high = torch.full_like(low, _GREATEST_POWER)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = unit**middle
        enough = tried.mean((1, 2), keepdim=True).square() >= _SPREAD * tried.square().mean(
            (1, 2), keepdim=True
        )
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return unit**low


def _with_neighbours(maps: Maps) -> Maps:
    """3/4 of each cell and 1/8 of each neighbour along the columns, cells at the border their own
    neighbours.
    """
    left = maps[..., [0]]
    right = maps[..., [-1]]
    return (
        0.75 * maps
        + (torch.cat([left, maps[..., :-1]], -1) + torch.cat([maps[..., 1:], right], -1)) / 8
    )


def _kept(
    model: Model, images: Images, targets: Labels, candidates: Float[Tensor, "candidates batch _ _"]
) -> Float[Tensor, "candidates batch"]:
    """Return the target's probability with the share _KEPT of the patches that a candidate ranks
    highest, the rest blurred.
    """
    count = len(candidates)
    ranks = candidates.flatten(2).argsort(dim=2, descending=True, stable=True).argsort(dim=2)
    removed = (ranks >= round(_KEPT * ranks.shape[2])).flatten(0, 1)
    which = torch.arange(len(images), device=images.device).repeat(count)
    logits = Variants(model, images).logits(which, removed)
    found = logits.float().softmax(-1).gather(1, targets.repeat(count)[:, None].to(logits.device))
    return found.view(count, -1).to(candidates.device)
