"""Refinement of patch maps by the model's own attention between patches: alike patches get alike
values.

S is the attention between patches, mean over layers and heads, plus its transpose, with rows scaled
to sum to 1. A step replaces each patch's value by the mean over the patches that it attends to or
that attend to it. S is similar to a symmetric matrix (S = D⁻¹ W with W symmetric), so its
eigenvalues are real and in [-1, 1], and some are negative: where patches of an object attend to the
background (as in vit-digits), one step exchanges the two. Two steps, S², have eigenvalues in [0,
1]: a patch's value becomes the mean over the patches that share its neighbours, and no contrast is
ever reversed. So steps are counted in twos.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import without_autocast
from vitlens.analysis.attention.registry import REFINE_STEPS
from vitlens.errors import InputError, UnsupportedError, argument
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.numbering import numbers_text
from vitlens.shapes import Images, Maps, TokenLayout

Affinity = Float[Tensor, "batch patches patches"]


def affinity(model: Model, images: Images, *, layers: Sequence[int] | None = None) -> Affinity:
    """S of each image (module docstring), from one forward pass; layers: used ones, from 0 (None:
    all).

    Raises UnsupportedError for a model without attention between the patches of one grid,
    InputError for a layer that has none.
    """
    chosen = require_affinity(model, layers)
    parts: list[Affinity] = []

    def take(call: AttentionCall) -> None:
        if call.site.layer in chosen:
            parts.append(patch_attention(call, model.layout))

    observe(model, images, take)
    return similarity_of(parts)


def patch_attention(call: AttentionCall, layout: TokenLayout) -> Affinity:
    """Return one layer's attention between patches, mean over heads, without the prefix; rows do
    not sum to 1.
    """
    first = len(layout.prefix)
    device = (call.rows((0,)) if call.inputs is None else call.inputs.query).device
    with without_autocast(device):
        weights = (precise(part.precise().weights()) for _, part in call.parts())
        return torch.cat([each[:, :, first:, first:].mean(1) for each in weights]).detach()


def similarity_of(layers: Sequence[Affinity]) -> Affinity:
    """S of some layers' attention between patches."""
    attention = torch.stack(list(layers)).sum(0)
    both = attention + attention.transpose(1, 2)
    return both / both.sum(-1, keepdim=True).clamp_min(torch.finfo(both.dtype).tiny)


def refined(maps: Maps, similarity: Affinity, *, steps: int = REFINE_STEPS) -> Maps:
    """Return maps (batch, rows, columns) after an even number of steps of S, 0 for none.

    Linear: signs and constants are kept. Raises InputError for maps of another grid.
    """
    patches = similarity.shape[-1]
    if maps.shape[1] * maps.shape[2] != patches:
        raise InputError(
            f"expected a map of {patches} patches to refine, found {maps.shape[1]}x{maps.shape[2]} "
            "cells"
        )
    flat = maps.flatten(1).to(similarity).unsqueeze(-1)
    for _ in range(steps):
        flat = similarity @ flat
    smoothed: Maps = flat.squeeze(-1).unflatten(1, maps.shape[1:])
    return smoothed


def require_affinity(model: Model, layers: Sequence[int] | None = None) -> Sequence[int]:
    """Return the layers in which all tokens of one grid attend to each other, or these of them.

    Raises UnsupportedError for a model without any, InputError for a layer that is none.
    """
    layout = model.anatomy.layout
    known = list[int]()
    if layout is not None and model.anatomy.attention_modules:
        sites = survey_weights(model, probe_images(model, 1))
        whole = (site for site in sites if site.kind == "patch" and site.windows is None)
        known = [site.layer for site in whole if site.queries == site.keys == layout.tokens]
    if not known:
        raise UnsupportedError(
            "expected attention between the patches of one grid for "
            f"{argument('refine', 'affinity')}, found none in "
            f"{model.alias} ({model.anatomy.family}); use {argument('views')}, which any model has"
        )
    wrong = [layer for layer in layers or () if layer not in known]
    if wrong or (layers is not None and not layers):
        found = f"layer {wrong[0]}" if wrong else "no layer"
        raise InputError(
            f"expected layers {numbers_text(known)} of {model.alias} to refine with, found {found}"
        )
    return known if layers is None else layers
