"""Query and key components of attention logits, the bi-orthogonal decomposition of Doshi 2026.

A query is the sum of three parts:
- mean: the mean of all queries of the image;
- position: the mean over images of what is left, at each position;
- content: the rest.

A key is the sum of position and content only, because the softmax does not depend on the mean of
the keys. The logits are the sum of the products of these parts.

The share of a product is its covariance with the logits, divided by their variance. Both are over
the keys of a row, summed over queries and images, so the shares add up to 1. The two products of
the mean query do not depend on the query. Together they are orthogonal to the other products, so
their share is a true share of the variance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.batch import layers_of
from vitlens.analysis.heads.evidence import GROUPS, by_group, jackknife_means
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.errors import InputError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import Parts, groups_of

SAME_BY_POSITION: Final = "same keys by position"
SAME_BY_CONTENT: Final = "same keys by content"
PRODUCTS: Final = {  # the part of the query, then the part of the key
    SAME_BY_POSITION: ("mean", "position"),
    SAME_BY_CONTENT: ("mean", "content"),
    "position to position": ("position", "position"),
    "position to content": ("position", "content"),
    "content to position": ("content", "position"),
    "content to content": ("content", "content"),
}
FEWEST: Final = 8  # with fewer images, position cannot be separated from content
UNIFORM: Final = 0.1  # nats; if logits spread less over the keys of a row, attention is uniform
_TINY: Final = 1e-30  # avoids a division by 0


@dataclass(frozen=True)
class LayerParts:
    """The products of query and key of one layer.

    geometry: the geometry of the layer's tokens.
    shares (samples, heads, products): the share of each product, on all images, then without each
        group of images.
    spread (heads,): the standard deviation of the logits over the keys of a row, in nats.
    """

    geometry: Geometry
    shares: Float[Tensor, "samples heads products"]
    spread: Float[Tensor, " heads"]


def logit_parts(
    model: Model, images: Parts, size: int, advance: Callable[[int], object]
) -> Mapping[int, LayerParts]:
    """Return the parts of the attention logits between patches, by layer.

    A layer is included if every patch attends to every patch, and if scores are products of queries
    and keys. A bias of the scores must be the same for all images.

    Images pass twice, `size` at a time: for the means of queries and keys at each position, then
    for the products. Raises InputError for fewer than FEWEST images.
    """
    if len(images) < FEWEST:
        raise InputError(
            f"expected at least {FEWEST} images to tell position from content, found {len(images)}"
        )
    sources = groups_of(images)
    if sources is None:
        source_numbers = torch.arange(len(images))
    else:
        _, source_numbers = sources.cpu().unique(return_inverse=True)
    groups = source_numbers % GROUPS
    layers_of(model)  # survey the layers now: the passes below then count images only
    sums: dict[int, _Sums] = {}
    # the second pass needs the means of the first
    for collect in (_add_to_means, _add_products):
        for start in range(0, len(images), size):
            batch = images[start : start + size].to(model.device)
            batch_groups = groups[start : start + size]
            take = partial(_take, model=model, sums=sums, collect=collect, groups=batch_groups)
            observe(model, batch, take)
            advance(len(batch))
    counts = by_group(torch.ones(len(images)), groups)
    return {layer: _parts(total, counts) for layer, total in sorted(sums.items()) if total.usable}


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class _Sums:
    """Sums over images for one layer.

    bias (heads, query, key): the bias of the logits, 0 without one.
    usable: False if the logits are not products of queries and keys.
    images: the number of images in the first pass.
    queries, keys (heads, patches, width): sums of scaled queries and of keys of patches. The mean
        over the patches is subtracted for each image.
    products (groups, heads, products): sums of the covariances.
    """

    geometry: Geometry
    bias: Tensor
    usable: bool = True
    images: int = 0
    queries: Tensor = field(default_factory=_nothing)
    keys: Tensor = field(default_factory=_nothing)
    products: Tensor = field(default_factory=_nothing)


def _take(
    call: AttentionCall,
    *,
    model: Model,
    sums: dict[int, _Sums],
    collect: Callable[[_Sums, Tensor, Tensor, Tensor], None],
    groups: Tensor,
) -> None:
    """Collect the queries and keys of a call if its logits are their products.

    sums: the sums of each layer so far.
    collect: adds scaled queries and keys of patches, with the groups, to the sums of a layer.
    groups (batch,): the group of each image.
    """
    site = call.site
    geometry = geometry_of(call.site, model)
    is_one_call_of_patches = site.kind == "patch" and site.part == 0
    if not is_one_call_of_patches or geometry is None or call.inputs is None:
        if site.layer in sums:
            sums[site.layer].usable = False
        return
    inputs = call.inputs.map_tensors(precise)
    patches = slice(geometry.prefix, None)
    # None: a mask, or not the same for all images of this call
    common_bias = _bias_between(inputs.bias, patches)
    if site.layer not in sums:
        first_bias = torch.zeros(()) if common_bias is None else common_bias
        sums[site.layer] = _Sums(geometry, first_bias)
    layer = sums[site.layer]
    if common_bias is None or not _is_same(common_bias, layer.bias):
        layer.usable = False
    if layer.usable:
        queries = (inputs.query[..., patches, :] * inputs.scale).cpu().double()
        keys = inputs.key[..., patches, :].cpu().double()
        collect(layer, queries, keys, groups)


def _is_same(bias: Tensor, earlier_bias: Tensor) -> bool:
    return bias.shape == earlier_bias.shape and not bool((bias != earlier_bias).any())


def _bias_between(bias: Tensor | None, patches: slice) -> Tensor | None:
    """Return the bias of the logits between patches, (heads, query, key); 0 without one.

    The result is None for a mask, or if the bias differs between images.
    """
    if bias is None:
        return torch.zeros(())
    # an axis of length 1 is broadcast over all queries, or over all keys
    between_patches = bias
    if bias.shape[-2] > 1:
        between_patches = between_patches[..., patches, :]
    if bias.shape[-1] > 1:
        between_patches = between_patches[..., patches]
    differs = not bool((between_patches == between_patches[:1]).all())
    if bias.dtype == torch.bool or differs:
        return None
    common_bias = between_patches[0].cpu()
    if common_bias.dim() == 2:  # without an axis of heads
        common_bias = common_bias[None]
    return common_bias


def _add_to_means(layer: _Sums, queries: Tensor, keys: Tensor, _groups: Tensor) -> None:
    layer.images += len(queries)
    layer.queries = layer.queries + (queries - queries.mean(2, keepdim=True)).sum(0)
    layer.keys = layer.keys + (keys - keys.mean(2, keepdim=True)).sum(0)


def _add_products(layer: _Sums, queries: Tensor, keys: Tensor, groups: Tensor) -> None:
    covariances_of_images = covariances(
        queries,
        keys,
        layer.bias.double(),
        query_position=layer.queries / layer.images,
        key_position=layer.keys / layer.images,
    )
    layer.products = layer.products + by_group(covariances_of_images, groups)


def _parts(layer: _Sums, counts: Tensor) -> LayerParts:
    """Return the shares of the products in a layer.

    counts: the number of images in each group.
    """
    samples = jackknife_means(layer.products, counts)
    total = samples.sum(-1, keepdim=True)  # (samples, heads, 1): the sum of the squared logits
    pairs = layer.keys.shape[-2] ** 2
    spread = (total[0, :, 0] / pairs).clamp_min(0).sqrt()
    return LayerParts(layer.geometry, shares=samples / total.clamp_min(_TINY), spread=spread)


def covariances(
    queries: Float[Tensor, "images heads patches width"],
    keys: Float[Tensor, "images heads patches width"],
    bias: Float[Tensor, "heads patches patches"] | Float[Tensor, ""],
    *,
    query_position: Float[Tensor, "heads patches width"],
    key_position: Float[Tensor, "heads patches width"],
) -> Float[Tensor, "images heads products"]:
    """Return the covariance of each product with the logits, summed over queries and keys.

    The mean over the keys is subtracted from both. The sum of the result over products is the sum
    of the squared logits.

    bias: what the model adds to the products, the same for all images. The part of it that all
        queries share belongs to "same keys by position", the rest to "position to position".
    query_position, key_position: the position parts of queries and keys: the means over all images,
        after subtracting each image's mean over the patches.
    """
    keys = keys - keys.mean(2, keepdim=True)
    bias = bias - bias.mean(-1, keepdim=True)
    bias = bias.expand(queries.shape[1], queries.shape[2], keys.shape[2])
    mean = queries.mean(2, keepdim=True)
    query_parts = {
        "mean": mean.expand_as(queries),
        "position": query_position.expand_as(queries),
        "content": queries - mean - query_position,
    }
    key_parts = {"position": key_position.expand_as(keys), "content": keys - key_position}
    # For parts a of the queries q, and b of the keys k:
    # sum over i, j of (a_i . b_j) (q_i . k_j)
    # = sum over u, v of (sum over i of a_iu q_iv) (sum over j of b_ju k_jv).
    # So matrices (width, width) are enough, without any of the patches x patches.
    query_sums = {name: part.transpose(-1, -2) @ queries for name, part in query_parts.items()}
    key_sums = {name: part.transpose(-1, -2) @ keys for name, part in key_parts.items()}
    products = {}
    for name, (query_part, key_part) in PRODUCTS.items():
        products[name] = (query_sums[query_part] * key_sums[key_part]).sum((-1, -2))
    # With a bias, logits = products + bias, and three terms are missing. The covariance of a
    # product with the bias is `with_bias`. Those of the bias with products and with itself are in
    # `_with_logits`, split between the two products to which the bias belongs.
    # n are images, h heads, i queries, j keys and d channels.
    if bool(bias.any()):
        for name, (query_part, key_part) in PRODUCTS.items():
            with_bias = torch.einsum(
                "hij,nhid,nhjd->nh", bias, query_parts[query_part], key_parts[key_part]
            )
            products[name] = products[name] + with_bias
        shared = bias.mean(-2, keepdim=True).expand_as(bias)
        bias_parts = {SAME_BY_POSITION: shared, "position to position": bias - shared}
        for name, part in bias_parts.items():
            products[name] = products[name] + _with_logits(part, bias, queries, keys)
    return torch.stack([products[name] for name in PRODUCTS], -1)


def _with_logits(part: Tensor, bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the sum over queries and keys of a part of the bias times the logits, (images, heads).

    The logits are the products of queries and keys, plus the bias.
    """
    with_products: Tensor = torch.einsum("hij,nhid,nhjd->nh", part, queries, keys)
    return with_products + (part * bias).sum((-1, -2))
