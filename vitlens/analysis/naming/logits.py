"""By what each head attends: its attention logits split into parts of the query and of the key,
after the bi-orthogonal factor decomposition (Doshi 2026).

A query is the sum of the mean of its image's queries, of what its position adds (the mean over
images of what is left), and of the rest, its content; a key, whose mean over a row the softmax
removes, is the sum of position and content. The logits are the sum of the products of these parts.
The share of a product is its covariance with the logits over their variance, both over the keys of
a row, summed over queries and images: shares add up to 1. The two products of the mean query
together, the same keys whoever asks, are orthogonal to the others: theirs is a share of the
variance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.batch import layers_of
from vitlens.analysis.heads.evidence import GROUPS, by_group
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.specialisation import left_out
from vitlens.errors import InputError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import Parts, groups_of

SAME_BY_POSITION: Final = "same keys by position"
SAME_BY_CONTENT: Final = "same keys by content"
PRODUCTS: Final = {  # of the query's part and the key's
    SAME_BY_POSITION: ("mean", "position"),
    SAME_BY_CONTENT: ("mean", "content"),
    "position to position": ("position", "position"),
    "position to content": ("position", "content"),
    "content to position": ("content", "position"),
    "content to content": ("content", "content"),
}
FEWEST: Final = 8  # images, below which position cannot be told from content
UNIFORM: Final = 0.1  # nats: logits that spread less over the keys of a row leave attention uniform
_TINY: Final = 1e-30


@dataclass(frozen=True)
class LayerParts:
    """One layer's products of query and key. geometry: of its tokens; shares (samples, heads,
    products): over all images, then without each group of them; spread (heads,): the standard
    deviation of the logits of a row, nats.
    """

    geometry: Geometry
    shares: Float[Tensor, "samples heads products"]
    spread: Float[Tensor, " heads"]


def logit_parts(
    model: Model, images: Parts, size: int, advance: Callable[[int], object]
) -> Mapping[int, LayerParts]:
    """Return the parts of the attention logits between patches, by layer: of all layers in which
    each patch attends to each, and the model's scores are products of queries and keys, with a bias
    that is the same for all images or without.

    Images pass twice, `size` at a time: for the means of queries and keys at each position, then
    for the products. Raises InputError for fewer than FEWEST images.
    """
    if len(images) < FEWEST:
        raise InputError(
            f"expected at least {FEWEST} images to tell position from content, found {len(images)}"
        )
    own = groups_of(images)
    order = torch.arange(len(images)) if own is None else own.cpu().unique(return_inverse=True)[1]
    layers_of(model)  # the passes that survey the layers are not counted
    sums: dict[int, _Sums] = {}
    for collect in (_add_to_means, _add_products):
        for start in range(0, len(images), size):
            batch = images[start : start + size].to(model.device)
            numbers = order[start : start + size] % GROUPS
            observe(model, batch, partial(_take, model, sums, collect, numbers))
            advance(len(batch))
    counts = by_group(torch.ones(len(images)), order % GROUPS)
    return {layer: _parts(found, counts) for layer, found in sorted(sums.items()) if found.usable}


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class _Sums:
    """Sums over the images of one layer.

    bias: of its logits (heads, query, key), or 0; usable: False where queries and keys do not make
    up the logits; images: of the first pass; queries, keys (heads, patches, width): sums of the
    queries (scaled) and keys of patches, each without its mean over the patches; products (groups,
    heads, products): sums of the covariances.
    """

    geometry: Geometry
    bias: Tensor
    usable: bool = True
    images: int = 0
    queries: Tensor = field(default_factory=_nothing)
    keys: Tensor = field(default_factory=_nothing)
    products: Tensor = field(default_factory=_nothing)


def _take(
    model: Model,
    sums: dict[int, _Sums],
    collect: Callable[[_Sums, Tensor, Tensor, Tensor], None],
    groups: Tensor,
    call: AttentionCall,
) -> None:
    """Collect the queries and keys of a call, where they make up its logits; groups (batch,): of
    the images.
    """
    site = call.site
    place = geometry_of(call.site, model)
    if site.kind != "patch" or place is None or call.inputs is None or site.part:
        if site.layer in sums:
            sums[site.layer].usable = False
        return
    inputs = call.inputs.map_tensors(precise)
    patches = slice(place.prefix, None)
    bias = torch.zeros(())
    fixed = True
    if inputs.bias is not None:
        whole = inputs.bias[..., patches, :] if inputs.bias.shape[-2] > 1 else inputs.bias
        whole = whole[..., patches] if whole.shape[-1] > 1 else whole
        fixed = inputs.bias.dtype != torch.bool and bool((whole == whole[:1]).all())
        bias = whole[0].cpu()
        bias = bias[None] if bias.dim() == 2 else bias
    layer = sums.setdefault(site.layer, _Sums(place, bias))
    layer.usable &= fixed and bias.shape == layer.bias.shape and bool((bias == layer.bias).all())
    if layer.usable:
        queries = (inputs.query[..., patches, :] * inputs.scale).cpu().double()
        keys = inputs.key[..., patches, :].cpu().double()
        collect(layer, queries, keys, groups)


def _add_to_means(layer: _Sums, queries: Tensor, keys: Tensor, _groups: Tensor) -> None:
    layer.images += len(queries)
    layer.queries = layer.queries + (queries - queries.mean(2, keepdim=True)).sum(0)
    layer.keys = layer.keys + (keys - keys.mean(2, keepdim=True)).sum(0)


def _add_products(layer: _Sums, queries: Tensor, keys: Tensor, groups: Tensor) -> None:
    by_image = covariances(
        queries,
        keys,
        layer.bias.double(),
        position=layer.queries / layer.images,
        of_key=layer.keys / layer.images,
    )
    layer.products = layer.products + by_group(by_image, groups)


def _parts(layer: _Sums, counts: Tensor) -> LayerParts:
    samples = left_out(layer.products, counts)
    whole = samples.sum(-1, keepdim=True)
    pairs = layer.keys.shape[-2] ** 2
    spread = (whole[0, :, 0] / pairs).clamp_min(0).sqrt()
    return LayerParts(layer.geometry, samples / whole.clamp_min(_TINY), spread)


def covariances(
    queries: Float[Tensor, "images heads patches width"],
    keys: Float[Tensor, "images heads patches width"],
    bias: Float[Tensor, "heads patches patches"] | Float[Tensor, ""],
    *,
    position: Float[Tensor, "heads patches width"],
    of_key: Float[Tensor, "heads patches width"],
) -> Float[Tensor, "images heads products"]:
    """Return the sum over queries and keys of each product times the logits, both without their
    mean over the keys.

    position, of_key: what the positions of queries and keys add, the means over all images of
    queries and keys without their means over the patches. bias: what the model adds to the
    products, the same for all images: what all queries share of it belongs to the positions of keys
    alone, the rest to position and position. The sum over products is that of the squared logits.
    """
    keys = keys - keys.mean(2, keepdim=True)
    bias = (bias - bias.mean(-1, keepdim=True)).expand(
        queries.shape[1], queries.shape[2], keys.shape[2]
    )
    mean = queries.mean(2, keepdim=True)
    parts = {"mean": mean, "position": position, "content": queries - mean - position}
    of_keys = {"position": of_key, "content": keys - of_key}
    # sum over i, j of (a_i . b_j) (q_i . k_j) = sum over u, v of (sum over i of a_iu q_iv) (sum
    # over j of b_ju k_jv)
    left = {
        name: part.expand_as(queries).transpose(-1, -2) @ queries for name, part in parts.items()
    }
    right = {name: part.expand_as(keys).transpose(-1, -2) @ keys for name, part in of_keys.items()}
    found = {}
    for name, (one, other) in PRODUCTS.items():
        found[name] = (left[one] * right[other]).sum((-1, -2))
    if bool(bias.any()):
        shared = bias.mean(-2, keepdim=True).expand_as(bias)
        with_logits = {
            name: torch.einsum("hij,nhid,nhjd->nh", part, queries, keys)
            + (part * bias).sum((-1, -2))
            for name, part in (("shared", shared), ("rest", bias - shared))
        }
        for name, (one, other) in PRODUCTS.items():
            left_part = parts[one].expand_as(queries)
            right_part = of_keys[other].expand_as(keys)
            found[name] = found[name] + torch.einsum(
                "hij,nhid,nhjd->nh", bias, left_part, right_part
            )
        found[SAME_BY_POSITION] = found[SAME_BY_POSITION] + with_logits["shared"]
        found["position to position"] = found["position to position"] + with_logits["rest"]
    return torch.stack([found[name] for name in PRODUCTS], -1)
