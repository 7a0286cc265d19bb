"""`best`: a class-specific map of a ViT, combined from published maps that fail in different ways.

Gradient-weighted rollout (G) covers all layers but separates several objects in view poorly; GradCAM (C) separates
them but on some models points beside the object; HiResCAM with LibraGrad's gradients (N) lies between the two. Each is
made alike between patches that attend alike (S², analysis/attention/affinity.py) and divided by its mean. Their product
V = S²G · (S²C⁺ + S²N⁺), averaged over two views half a patch apart, says where the object is, but no longer which of
its patches count most; G, unsmoothed, does. The map is V³ · G. benchmarks/best_map.md has the sets that the choice
looked at, those kept aside, and what it does not reach.
"""

from typing import Final

import torch

from vitlens.analysis.attention.affinity import Affinity, normalised, patch_attention, refined
from vitlens.analysis.attention.chain import chained, without_autocast
from vitlens.analysis.attention.relevance import gradient_rollout_maps
from vitlens.analysis.faithfulness.resampled import AnyMaps, enlarged
from vitlens.attribution.cam import gradcam, hirescam
from vitlens.attribution.refinement import evidence
from vitlens.attribution.target_layer import layer_gradients
from vitlens.attribution.views import over_views
from vitlens.lens.libra import libra_gradients
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

VIEWS_OF_BEST: Final = 2
_POWER: Final = 3  # of V: 1 keeps more of which patches count, 4 more of where the object is


def best_maps(model: Model, images: Images, targets: Labels) -> AnyMaps:
    """The recommended maps (batch, 2 · rows, 2 · columns) of patches, for target classes (batch,); not negative.

    A map that no part of the evidence supports is 0. Raises UnsupportedError for a model without a chain of attention
    over one sequence of tokens.
    """
    raw: list[Maps] = []

    def located(seen: Images) -> Maps:
        chain = chained(model, seen, targets=targets, gradient=True)
        with torch.no_grad(), without_autocast(model.device):
            calls = [call for call in chain.calls if call.site.kind == "patch"]
            similarity = normalised(torch.stack([patch_attention(call, model.layout) for call in calls]).sum(0))
            raw.append(gradient_rollout_maps(chain))
        return evidence(_smooth(raw[-1], similarity)) * _agreed(model, seen, targets, similarity)

    places = over_views(located, images, views=VIEWS_OF_BEST, cells=model.layout.grid)
    size = places.shape[-2], places.shape[-1]
    return evidence(places) ** _POWER * enlarged(evidence(raw[0]), size)


def _agreed(model: Model, images: Images, targets: Labels, similarity: Affinity) -> Maps:
    """GradCAM plus HiResCAM with LibraGrad's gradients, each smoothed and divided by its mean."""
    plain = layer_gradients(model, images, targets)
    with libra_gradients(model):
        libra = layer_gradients(model, images, targets)
    cams = (
        gradcam(plain.activations.float(), plain.gradients.float()),
        hirescam(libra.activations.float(), libra.gradients.float()),
    )
    first, second = (evidence(_smooth(cam, similarity)) for cam in cams)
    return first + second


def _smooth(maps: Maps, similarity: Affinity) -> Maps:
    return refined(maps.clamp_min(0), similarity)
