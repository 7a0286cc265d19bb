"""Query and key components of attention logits.

The decomposition is the bi-orthogonal one of Doshi 2026.

A query is the sum of three parts: the mean of its image's queries; what its position adds, the mean
over images of what is left; and the rest, its content. A key is the sum of position and content, as
the softmax removes its mean over a row. The logits are the sum of the products of these parts.

The share of a product is its covariance with the logits over their variance, both over the keys of
a row, summed over queries and images: shares add up to 1. The two products of the mean query
together, query-independent components, are orthogonal to the others: theirs is a share of the
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
from vitlens.analysis.heads.evidence import GROUPS, by_group, jackknife_means
from vitlens.analysis.heads.geometry import Geometry, geometry_of
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
FEWEST: Final = 8  # images: of fewer, position cannot be separated from content
UNIFORM: Final = 0.1  # nats: logits that spread less over the keys of a row leave attention uniform
_TINY: Final = 1e-30


@dataclass(frozen=True)
class LayerParts:
    """The products of query and key of one layer.

    geometry: the geometry of its tokens.
    shares (samples, heads, products): over all images, then without each group of them.
    spread (heads,): the standard deviation of the logits of a row, nats.
    """

    geometry: Geometry
    shares: Float[Tensor, "samples heads products"]
    spread: Float[Tensor, " heads"]


def logit_parts(
    model: Model, images: Parts, size: int, advance: Callable[[int], object]
) -> Mapping[int, LayerParts]:
    """Return the parts of the attention logits between patches, by layer.

    Layers are included in which each patch attends to each. Their scores must be products of
    queries and keys, with a bias that is the same for all images, or without one. Images pass
    twice, `size` at a time: for the means of queries and keys at each position, then for the
    products. Raises InputError for fewer than FEWEST images.
    """
    if len(images) < FEWEST:
        raise InputError(
            f"expected at least {FEWEST} images to tell position from content, found {len(images)}"
        )
    sources = groups_of(images)
    if sources is None:
        numbers = torch.arange(len(images))
    else:
        numbers = sources.cpu().unique(return_inverse=True)[1]
    groups = numbers % GROUPS
    layers_of(model)  # the passes that survey the layers are not counted
    sums: dict[int, _Sums] = {}
    for collect in (_add_to_means, _add_products):
        for start in range(0, len(images), size):
            batch = images[start : start + size].to(model.device)
            take = partial(_take, model, sums, collect, groups[start : start + size])
            observe(model, batch, take)
            advance(len(batch))
    counts = by_group(torch.ones(len(images)), groups)
    return {layer: _parts(total, counts) for layer, total in sorted(sums.items()) if total.usable}


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class _Sums:
    """Sums over the images of one layer.

    bias: the bias of its logits (heads, query, key), or 0.
    usable: False where queries and keys do not make up the logits.
    images: the number of images of the first pass.
    queries, keys (heads, patches, width): sums of the queries (scaled) and keys of patches, each
        without its mean over the patches.
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
    model: Model,
    sums: dict[int, _Sums],
    collect: Callable[[_Sums, Tensor, Tensor, Tensor], None],
    groups: Tensor,
    call: AttentionCall,
) -> None:
    """Collect the queries and keys of a call, where they make up its logits.

    groups (batch,): the source of each image.
    """
    site = call.site
    geometry = geometry_of(call.site, model)
    if site.kind != "patch" or geometry is None or call.inputs is None or site.part:
        if site.layer in sums:
            sums[site.layer].usable = False
        return
    inputs = call.inputs.map_tensors(precise)
    patches = slice(geometry.prefix, None)
    bias = _bias_between(inputs.bias, patches)
    layer = sums.setdefault(site.layer, _Sums(geometry, torch.zeros(()) if bias is None else bias))
    if bias is None or bias.shape != layer.bias.shape or not bool((bias == layer.bias).all()):
        layer.usable = False
    if layer.usable:
        queries = (inputs.query[..., patches, :] * inputs.scale).cpu().double()
        keys = inputs.key[..., patches, :].cpu().double()
        collect(layer, queries, keys, groups)


def _bias_between(bias: Tensor | None, patches: slice) -> Tensor | None:
    """Return the bias of the logits between patches, 0 without one.

    None for a mask, or where it differs between images.
    """
    if bias is None:
        return torch.zeros(())
    # an axis of length 1 holds for all queries, or for all keys
    on_queries = bias[..., patches, :] if bias.shape[-2] > 1 else bias
    between = on_queries[..., patches] if bias.shape[-1] > 1 else on_queries
    if bias.dtype == torch.bool or not bool((between == between[:1]).all()):
        return None
    first = between[0].cpu()
    return first[None] if first.dim() == 2 else first


def _add_to_means(layer: _Sums, queries: Tensor, keys: Tensor, _groups: Tensor) -> None:
    layer.images += len(queries)
    layer.queries = layer.queries + (queries - queries.mean(2, keepdim=True)).sum(0)
    layer.keys = layer.keys + (keys - keys.mean(2, keepdim=True)).sum(0)


def _add_products(layer: _Sums, queries: Tensor, keys: Tensor, groups: Tensor) -> None:
    by_image = covariances(
        queries,
        keys,
        layer.bias.double(),
        query_position=layer.queries / layer.images,
        key_position=layer.keys / layer.images,
    )
    layer.products = layer.products + by_group(by_image, groups)


def _parts(layer: _Sums, counts: Tensor) -> LayerParts:
    samples = jackknife_means(layer.products, counts)
    total = samples.sum(-1, keepdim=True)
    pairs = layer.keys.shape[-2] ** 2
    spread = (total[0, :, 0] / pairs).clamp_min(0).sqrt()
    return LayerParts(layer.geometry, samples / total.clamp_min(_TINY), spread)


def covariances(
    queries: Float[Tensor, "images heads patches width"],
    keys: Float[Tensor, "images heads patches width"],
    bias: Float[Tensor, "heads patches patches"] | Float[Tensor, ""],
    *,
    query_position: Float[Tensor, "heads patches width"],
    key_position: Float[Tensor, "heads patches width"],
) -> Float[Tensor, "images heads products"]:
    """Return the sum over queries and keys of each product times the logits.

    Both are without their mean over the keys; the sum over products is that of the squared logits.

    query_position, key_position: what the positions of queries and keys add, the means over all
        images of queries and keys without their means over the patches.
    bias: what the model adds to the products, the same for all images.

    The part of it that all queries share belongs to the positions of keys, the rest to position and
    position.
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
    # sum over i, j of (a_i . b_j) (q_i . k_j) = sum over u, v of (sum over i of a_iu q_iv) (sum
    # over j of b_ju k_jv)
    query_sums = {name: part.transpose(-1, -2) @ queries for name, part in query_parts.items()}
    key_sums = {name: part.transpose(-1, -2) @ keys for name, part in key_parts.items()}
    products = {}
    for name, (query_part, key_part) in PRODUCTS.items():
        products[name] = (query_sums[query_part] * key_sums[key_part]).sum((-1, -2))
    if bool(bias.any()):
        for name, (query_part, key_part) in PRODUCTS.items():
            with_bias = torch.einsum(
                "hij,nhid,nhjd->nh", bias, query_parts[query_part], key_parts[key_part]
            )
            products[name] = products[name] + with_bias
        shared = bias.mean(-2, keepdim=True).expand_as(bias)
        for name, part in (
            (SAME_BY_POSITION, shared),
            ("position to position", bias - shared),
        ):
            products[name] = products[name] + _with_logits(part, bias, queries, keys)
    return torch.stack([products[name] for name in PRODUCTS], -1)


def _with_logits(part: Tensor, bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the sum over queries and keys of a part of the bias times the logits.

    The shape is (images, heads).
    """
    with_products: Tensor = torch.einsum("hij,nhid,nhjd->nh", part, queries, keys)
    return with_products + (part * bias).sum((-1, -2))
