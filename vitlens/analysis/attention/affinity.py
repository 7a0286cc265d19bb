"""Refinement of patch maps by attention between patches: similar patches get similar values.

S is the attention between patches, mean over layers and heads, plus its transpose, with rows scaled
to sum to 1. A step replaces each patch's value by a mean. It is over the patches that it attends to
or that attend to it.

The number of steps is always even. S is similar to a symmetric matrix (S = D⁻¹ W with W symmetric),
so its eigenvalues are real and in [-1, 1]. Some are negative: if patches of an object attend to the
background (as in vit-digits), one step exchanges the two. Two steps, S², have eigenvalues in
[0, 1]. A patch's value then becomes the mean over the patches that share its neighbours, and no
contrast is reversed.
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
    """Return S of each image (see the module's docstring), from one forward pass.

    layers: the numbers of the layers that are used, from 0 (None: all).

    Raises UnsupportedError for a model without attention between the patches of one grid, and
    InputError for a layer without it.
    """
    used_layers = require_affinity(model, layers)
    parts: list[Affinity] = []

    def take(call: AttentionCall) -> None:
        """Add one layer; called for each attention call of the pass."""
        if call.site.layer in used_layers:
            parts.append(patch_attention(call, model.layout))

    observe(model, images, take)
    return similarity_of(parts)


def patch_attention(call: AttentionCall, layout: TokenLayout) -> Affinity:
    """Return one layer's attention between patches, the mean over heads.

    The prefix is left out, so rows do not sum to 1.
    """
    prefix = len(layout.prefix)
    # a call without inputs holds the weights that the model computed itself
    some_tensor = call.rows((0,)) if call.inputs is None else call.inputs.query  # for its device
    means = []
    with without_autocast(some_tensor.device):
        for _, part in call.parts():
            # computed from precise inputs; weights that the model computed may not be precise yet
            weights = precise(part.precise().weights())
            means.append(weights[:, :, prefix:, prefix:].mean(1))
        return torch.cat(means).detach()


def similarity_of(layers: Sequence[Affinity]) -> Affinity:
    """Return S of some layers' attention between patches."""
    attention = torch.stack(list(layers)).sum(0)
    symmetric = attention + attention.transpose(1, 2)
    tiny = torch.finfo(symmetric.dtype).tiny
    return symmetric / symmetric.sum(-1, keepdim=True).clamp_min(tiny)


def refine_maps(maps: Maps, similarity: Affinity, *, steps: int = REFINE_STEPS) -> Maps:
    """Return maps (batch, rows, columns) after an even number of steps of S, 0 for none.

    The result is linear in the maps, and constant maps are unchanged. Raises InputError for maps of
    another grid.
    """
    patches = similarity.shape[-1]
    if maps.shape[1] * maps.shape[2] != patches:
        raise InputError(
            f"expected a map of {patches} patches to refine, found {maps.shape[1]}x{maps.shape[2]} "
            "cells"
        )
    values = maps.flatten(1).to(similarity).unsqueeze(-1)
    for _ in range(steps):
        values = similarity @ values
    refined_maps: Maps = values.squeeze(-1).unflatten(1, maps.shape[1:])
    return refined_maps


def require_affinity(model: Model, layers: Sequence[int] | None = None) -> Sequence[int]:
    """Return the layers in which all tokens of one grid attend to each other, or `layers`.

    Raises UnsupportedError for a model without such a layer, and InputError if one of `layers` is
    no such layer.
    """
    layout = model.anatomy.layout
    possible = list[int]()
    if layout is not None and model.anatomy.attention_modules:
        for site in survey_weights(model, probe_images(model, 1)):
            has_all_tokens = site.queries == site.keys == layout.tokens
            if site.kind == "patch" and site.windows is None and has_all_tokens:
                possible.append(site.layer)
    if not possible:
        raise UnsupportedError(
            "expected attention between the patches of one grid for "
            f"{argument('refine', 'affinity')}, found none in {model.alias} "
            f"({model.anatomy.family}); use {argument('views')}, which any model has"
        )
    if layers is None:
        return possible
    wrong = [layer for layer in layers if layer not in possible]
    if wrong or not layers:
        requested = f"layer {wrong[0]}" if wrong else "no layer"
        raise InputError(
            f"expected layers {numbers_text(possible)} of {model.alias} to refine with, found "
            f"{requested}"
        )
    return layers
