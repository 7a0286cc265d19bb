"""`best`: a class-specific map of a ViT, combined from published maps that fail in different ways, and tested on the
image before it is given.

Gradient-weighted rollout (G) covers all layers but separates several objects in view poorly; GradCAM (C) separates
them but on some models points beside the object; HiResCAM with LibraGrad's gradients (N) lies between the two. Each is
made alike between patches that attend alike (S² of the upper two thirds of the layers, affinity.py) and divided by its
mean. Their product V = S²G · (S²C⁺ + S²N⁺) says where the object is, but not which of its patches count most; the maps
that are not smoothed do. So there are three candidates (B: along each axis 3/4 of a patch and 1/8 of each neighbour):

    smooth: (4/5 R + 1/5 BR)ᵖ with R = (V⁶ · G)^⅙        sharp: V³ · G · (C⁺ + N⁺)        rollout: G

The smooth one is given, unless the image says otherwise: each candidate's highest 25 and 50 % of the patches are kept,
the rest is blurred, and where the target is more probable by MARGIN with those of another one, that one is given.
The power p, from 1 to 4, decides how much the highest patches stand out, not the order of patches (_contrasted).
benchmarks/best_map.md has the sets that the choice of all this looked at, those kept aside, and what is not reached.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.affinity import normalised, patch_attention, refined
from vitlens.analysis.attention.chain import Chain, without_autocast
from vitlens.analysis.attention.gradients import with_module_gradients
from vitlens.analysis.attention.relevance import gradient_rollout_maps
from vitlens.analysis.faithfulness.masking import logits_without_patches
from vitlens.attribution.cam import gradcam, hirescam
from vitlens.attribution.refinement import evidence
from vitlens.attribution.target_layer import layer_gradients, target_layer
from vitlens.lens.libra import libra_gradients
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

MARGIN: Final = 0.1  # in probability: how much better another candidate than the smooth one must be
_SMOOTH_POWER, _SHARP_POWER = 6, 3  # of V
_LEAST_POWER, _GREATEST_POWER = 1.0, 4.0  # of the smooth map
_SPREAD: Final = 0.15  # of its values over the patches: at 1/N one patch alone is not 0, at 1 all are equal
_HALVINGS: Final = 20  # of the interval that holds the power
_BLURRED: Final = 0.2  # the share of B
_SHARES: Final = (0.25, 0.5)  # of the patches that are kept


@dataclass(frozen=True)
class _Parts:
    """On the grid of patches: where (V), and the maps that are not smoothed: rollout (G), and agreed (C⁺ + N⁺), each
    divided by its mean."""

    where: Maps
    rollout: Maps
    agreed: Maps


def best_maps(model: Model, images: Images, targets: Labels) -> Maps:
    """The recommended maps (batch, rows, columns) of patches, for target classes (batch,); not negative.

    A map that no part of the evidence supports is 0. Raises UnsupportedError for a model without a chain of attention
    over one sequence of tokens.
    """
    parts = _parts(model, images, targets)
    smooth = _smooth(parts)
    others = (parts.where**_SHARP_POWER * parts.rollout * parts.agreed, parts.rollout)
    chosen, most = smooth, _kept(model, images, targets, smooth) + MARGIN
    for other in others:
        kept = _kept(model, images, targets, other)
        chosen = torch.where((kept > most)[:, None, None], other, chosen)
        most = torch.maximum(kept, most)
    return chosen


def _parts(model: Model, images: Images, targets: Labels) -> _Parts:
    layer = target_layer(model)
    calls, output, gradient = with_module_gradients(model, images, targets, layer.module)
    with libra_gradients(model):
        libra = layer_gradients(model, images, targets)
    chain = Chain(model, libra.logits, calls, model.anatomy.readout or "mean")
    with torch.no_grad(), without_autocast(model.device):
        patch = [call for call in calls if call.site.kind == "patch"]
        upper = patch[len(patch) // 3 :]  # the lower ones see what any image has; a map must change with the upper
        similarity = normalised(torch.stack([patch_attention(call, model.layout) for call in upper]).sum(0))
        rollout = gradient_rollout_maps(chain).clamp_min(0)
        cams = (
            gradcam(layer.as_maps(output).float(), layer.as_maps(gradient).float()).clamp_min(0),
            hirescam(libra.activations.float(), libra.gradients.float()).clamp_min(0),
        )
        first, second = (evidence(refined(cam, similarity)) for cam in cams)
        where = evidence(refined(rollout, similarity)) * (first + second)
    return _Parts(where, evidence(rollout), evidence(cams[0]) + evidence(cams[1]))


def _smooth(parts: _Parts) -> Maps:
    """The smooth candidate."""
    root = (parts.where**_SMOOTH_POWER * parts.rollout) ** (1 / _SMOOTH_POWER)
    return _contrasted(torch.lerp(root, _with_neighbours(_with_neighbours(root).mT).mT, _BLURRED))


def _contrasted(maps: Maps) -> Maps:
    """Each map, divided by its greatest value, to the greatest of these powers with a spread of at least _SPREAD.

    The spread of values m over N patches is (Σ m)² / (N Σ m²). Without this bound a map of few patches would show one
    or two of them and nothing else.
    """
    unit = maps / maps.amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    low = unit.new_full((len(unit), 1, 1), _LEAST_POWER)
    high = torch.full_like(low, _GREATEST_POWER)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = unit**middle
        enough = tried.mean((1, 2), keepdim=True).square() >= _SPREAD * tried.square().mean((1, 2), keepdim=True)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return unit**low


def _with_neighbours(maps: Maps) -> Maps:
    """3/4 of each cell and 1/8 of each neighbour along the columns, cells at the border their own neighbours."""
    left, right = maps[..., [0]], maps[..., [-1]]
    return 0.75 * maps + (torch.cat([left, maps[..., :-1]], -1) + torch.cat([maps[..., 1:], right], -1)) / 8


def _kept(model: Model, images: Images, targets: Labels, maps: Maps) -> Float[Tensor, " batch"]:
    """The target's probability with the patches that a map ranks highest, the rest blurred, mean over _SHARES."""
    ranks = maps.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    removed = torch.cat([ranks >= round(share * ranks.shape[1]) for share in _SHARES])
    which = torch.arange(len(images), device=images.device).repeat(len(_SHARES))
    logits = logits_without_patches(model, images, which, removed, grid=model.layout.grid)
    found = logits.float().softmax(-1).gather(1, targets.repeat(len(_SHARES))[:, None].to(logits.device))
    return found.view(len(_SHARES), -1).mean(0)
