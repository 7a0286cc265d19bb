"""Queries and keys of heads: the product of a pair by dimension, and all of them in one map.

The map follows AttentionViz (Yeh 2023). Its distances stand for attention, because queries and keys
are changed first in two ways that leave the attention weights as they are:
- a vector is added to all keys, which adds the same number to all scores of a query;
- queries are multiplied by a factor, and keys are divided by it.

A few vectors and factors are tried. The best ones make distances correlate most with dot products,
over the keys of a query.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.features.embedding import embed
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.errors import InputError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_parts
from vitlens.shapes import Images
from vitlens.summary import Line, Summary

TOP: Final = 3  # dimensions that are set to zero together
_DRAWS: Final = 50  # random sets of TOP other dimensions, as a control
# Factors of the queries that are tried, in units of the factor that makes queries and keys equally
# long. With far larger factors all keys would lie in one place.
_STEPS: Final = (0.5, 0.71, 1.0, 1.41, 2.0)
_SMALLEST: Final = 1e-12  # least divisor
_NEAR: Final = 0.1  # a key is near a query if it is among this part of the nearest in the map
_FEWEST: Final = 20  # with fewer keys in an image, near keys are not counted
_POINTS: Final = 600  # of the map by default: queries and keys of all heads
_PERPLEXITY: Final = 30.0  # the usual one of t-SNE; smaller if there are few points


@dataclass(frozen=True, repr=False)
class Neurons(Summary):
    """The score of one query and one key of a head, by dimension; tensors on the CPU.

    query, key: the positions of both among the tokens.
    query_patch, key_patch: their patches (row, column), None for a prefix token.
    query_values, key_values: the vectors.
    products: the scaled products of both in each dimension. The score is their sum plus the bias.
    bias: what the model adds to the score.
    weight: the attention weight of the key.
    without: the weight if the TOP dimensions of the largest products are zero in the query.
    control: the mean weight if TOP other dimensions are zero.
    """

    layer: int
    head: int
    query: int
    key: int
    query_patch: tuple[int, int] | None
    key_patch: tuple[int, int] | None
    query_values: Float[Tensor, " head_dim"]
    key_values: Float[Tensor, " head_dim"]
    products: Float[Tensor, " head_dim"]
    bias: float
    weight: float
    without: float
    control: float

    @property
    def score(self) -> float:
        """Return the score before the softmax."""
        return float(self.products.sum()) + self.bias

    @property
    def order(self) -> Int[Tensor, " head_dim"]:
        """Return the dimensions, that of the largest product first."""
        return self.products.argsort(descending=True, stable=True)

    def summary(self) -> Iterator[Line]:
        """Yield the pair, its score and weight, and the weight without some dimensions."""
        yield Line("head", f"L{self.layer}.H{self.head}")
        yield Line("query, key", f"{self.query}, {self.key}")
        yield Line("score", self.score)
        yield Line("weight", self.weight, "fraction")
        yield Line(f"without the {TOP} largest products", self.without, "fraction")
        yield Line(f"without {TOP} others", self.control, "fraction")
        yield Line("products", self.products)


@dataclass(frozen=True)
class Alignment:
    """The agreement of distance and attention between queries and keys of one head.

    before: the correlation of distance and dot product over the keys of a query.
    after: the same correlation with the changed vectors.
    factor: the factor of the queries.
    """

    layer: int
    head: int
    before: float
    after: float
    factor: float


@dataclass(frozen=True, repr=False)
class QueryKeyMap(Summary):
    """Queries and keys of heads in one plane (t-SNE); tensors on the CPU.

    points (n, 2): the place of each point, for each head its queries and then its keys.
    is_key, layer, head, image, token: what each point stands for.
    alignments: the agreement of distance and attention for each head.
    near: 1 for a query if the key with its largest dot product is among the nearest tenth of keys
        in the map, else 0. Queries of images with few keys are left out.
    trustworthiness: the trustworthiness of the map.
    """

    points: Float[Tensor, "n 2"]
    is_key: Bool[Tensor, " n"]
    layer: Int[Tensor, " n"]
    head: Int[Tensor, " n"]
    image: Int[Tensor, " n"]
    token: Int[Tensor, " n"]
    alignments: tuple[Alignment, ...]
    near: Float[Tensor, " queries"]
    trustworthiness: float


@takes_images
def neurons(
    model: Model,
    images: AnyImages,
    *,
    layer: int,
    head: int,
    query: tuple[int, int] | None = None,
    key: tuple[int, int] | None = None,
    seed: int = 0,
) -> Neurons:
    """Return the score of one query and key of a head on one image, by dimension.

    query: the patch (row, column) of the query (None: CLS, or the middle patch without CLS).
    key: the patch (row, column) of the key (None: the patch that the query attends to most).
    seed: the seed of the other dimensions that are set to zero.

    Raises InputError for another number of images, and for a head or patch that does not exist.
    Raises UnsupportedError for a layer without queries and keys of the whole image.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> pair = vitlens.neurons(vit, torch.rand(1, 3, 32, 32), layer=3, head=1, query=(2, 2))
    >>> pair.products.shape, pair.query, pair.query_patch  # CLS is token 0
    (torch.Size([32]), 19, (2, 2))
    """
    parts = as_parts(images)
    if len(parts) != 1:
        raise InputError(f"expected one image, found {len(parts)}; give images[:1]")
    calls = _calls(model, parts[:1].to(model.device))
    _require_head(model, calls, layer, head)
    call, geometry = calls[layer]
    inputs = call.inputs
    assert inputs is not None  # _calls keeps no others
    if query is not None:
        query_position = _position(query, geometry)
    elif geometry.cls:
        query_position = geometry.cls[0]
    else:
        query_position = geometry.prefix + geometry.patches // 2
    scores_of_query = inputs.scores([query_position])  # (images, heads, one query, key)
    scores = scores_of_query[0, head, 0].double()
    weights = scores.softmax(-1)
    if key is not None:
        key_position = _position(key, geometry)
    else:
        key_position = geometry.prefix + int(weights[geometry.prefix :].argmax())
    query_values = inputs.query[0, head, query_position].double()
    keys = inputs.key[0, head].double()
    products = query_values * keys[key_position] * inputs.scale
    bias = scores - (keys @ query_values) * inputs.scale

    def weight_without(dimensions: Tensor) -> float:
        """Return the weight of the key with some dimensions of the query set to zero."""
        reduced = query_values.clone()
        reduced[dimensions.to(reduced.device)] = 0.0
        reduced_scores = (keys @ reduced) * inputs.scale + bias
        return float(reduced_scores.softmax(-1)[key_position])

    descending = products.argsort(descending=True, stable=True)
    top = descending[:TOP]
    others = descending[TOP:].sort().values.cpu()
    generator = torch.Generator().manual_seed(seed)
    controls = []
    if len(others) >= TOP:
        for _ in range(_DRAWS):
            drawn = torch.randperm(len(others), generator=generator)[:TOP]
            controls.append(weight_without(others[drawn]))
    return Neurons(
        layer=layer,
        head=head,
        query=query_position,
        key=key_position,
        query_patch=_patch(query_position, geometry),
        key_patch=_patch(key_position, geometry),
        query_values=query_values.cpu(),
        key_values=keys[key_position].cpu(),
        products=products.cpu(),
        bias=float(bias[key_position]),
        weight=float(weights[key_position]),
        without=weight_without(top),
        control=sum(controls) / len(controls) if controls else float("nan"),
    )


def _position(patch: tuple[int, int], geometry: Geometry) -> int:
    """Return the position of a patch among the tokens.

    Raises InputError for a patch that does not exist.
    """
    rows, columns = geometry.grid
    row, column = patch
    if not (0 <= row < rows and 0 <= column < columns):
        raise InputError(
            f"expected a patch from 0,0 to {rows - 1},{columns - 1}, found {row},{column}"
        )
    return geometry.prefix + row * columns + column


def _patch(position: int, geometry: Geometry) -> tuple[int, int] | None:
    """Return the row and column of the patch at a position, None for a prefix token."""
    if position < geometry.prefix:
        return None
    row, column = divmod(position - geometry.prefix, geometry.grid[1])
    return row, column


def _require_head(
    model: Model, calls: Mapping[int, tuple[AttentionCall, Geometry]], layer: int, head: int
) -> None:
    """Raise InputError for a head that does not exist."""
    if layer not in calls:
        raise InputError(
            f"expected a layer of {', '.join(map(str, calls))} of {model.alias}, found {layer}"
        )
    call, _ = calls[layer]
    heads = call.site.heads
    if not 0 <= head < heads:
        raise InputError(
            f"expected a head from 0 to {heads - 1} in layer {layer} of {model.alias}, found {head}"
        )


def _calls(model: Model, images: Images) -> dict[int, tuple[AttentionCall, Geometry]]:
    """Return the call and the geometry of layers in which all tokens have queries and keys.

    The keys of the result are numbers of layers. Raises UnsupportedError for a model without such a
    layer.
    """
    calls: dict[int, tuple[AttentionCall, Geometry]] = {}

    def keep(call: AttentionCall) -> None:
        geometry = geometry_of(call.site, model)
        if geometry is None or geometry.windows is not None or call.site.part:
            return
        if call.inputs is not None:
            calls[call.site.layer] = call.precise().detach(), geometry

    observe(model, images, keep)
    if not calls:
        raise UnsupportedError(
            "expected layers in which every token has a query and a key for the whole image, found "
            f"none in {model.alias}; vitlens attention shows its weights"
        )
    return calls


@takes_images
def query_key_map(
    model: Model,
    images: AnyImages,
    *,
    heads: Collection[tuple[int, int]] = (),
    points: int = _POINTS,
    seed: int = 0,
) -> QueryKeyMap:
    """Return queries and keys of heads in one plane, in which distance stands for attention.

    Compare distances only within a head: vectors of different heads have unrelated axes.

    heads: (layer, head) pairs, all by default.
    points: the largest number of points of all heads together. The tokens are drawn by the seed,
        the same ones for all heads.

    Raises InputError for a head that does not exist and for too few points. Raises UnsupportedError
    for a model without queries and keys of the whole image.

    >>> import vitlens
    >>> digits = vitlens.load_data("digits", limit=2)
    >>> joint = vitlens.query_key_map(vitlens.load("vit-digits"), digits, heads=[(5, 2)], points=40)
    >>> joint.points.shape, int(joint.is_key.sum())
    (torch.Size([40, 2]), 20)
    """
    parts = as_parts(images)
    batch = parts[: len(parts)].to(model.device)
    calls = _calls(model, batch)
    chosen_heads = list(heads)
    if not chosen_heads:
        for layer, (call, _) in calls.items():
            chosen_heads += [(layer, head) for head in range(call.site.heads)]
    for layer, head in chosen_heads:
        _require_head(model, calls, layer, head)
    # each token has two points, of its query and of its key
    tokens_per_head = points // (2 * len(chosen_heads))
    if tokens_per_head < 2:
        raise InputError(
            f"expected at least {4 * len(chosen_heads)} points for {len(chosen_heads)} heads, "
            f"found {points}"
        )
    all_heads = []
    for layer, head in chosen_heads:
        call, _ = calls[layer]
        assert call.inputs is not None  # _calls keeps no others
        tokens = call.inputs.query.shape[2]
        # a row stands for one token of one image: image * tokens + token
        order = torch.randperm(len(batch) * tokens, generator=torch.Generator().manual_seed(seed))
        drawn_rows = order[:tokens_per_head].sort().values
        image = drawn_rows // tokens
        device_rows = drawn_rows.to(batch.device)
        queries = call.inputs.query[:, head].flatten(0, 1)[device_rows].double().cpu()
        keys = call.inputs.key[:, head].flatten(0, 1)[device_rows].double().cpu()
        vectors, alignment = _align(queries, keys, image, layer, head)
        head_vectors = _HeadVectors(
            vectors=vectors,
            products=queries @ keys.T,
            image=image,
            token=drawn_rows % tokens,
            alignment=alignment,
        )
        all_heads.append(head_vectors)
    return _map_vectors(all_heads, seed)


class _HeadVectors(NamedTuple):
    """Queries and keys of one head at some tokens.

    vectors: the changed queries, then the changed keys.
    products: the dot products of the original queries and keys.
    image, token: the image and the number of each token.
    alignment: the agreement of distance and attention.
    """

    vectors: Float[Tensor, "m head_dim"]
    products: Float[Tensor, "n n"]
    image: Int[Tensor, " n"]
    token: Int[Tensor, " n"]
    alignment: Alignment


def _map_vectors(heads: Sequence[_HeadVectors], seed: int) -> QueryKeyMap:
    """Return the map of the vectors of all heads."""
    widest = max(head.vectors.shape[1] for head in heads)
    padded = []
    for head in heads:
        missing = widest - head.vectors.shape[1]
        padded.append(torch.nn.functional.pad(head.vectors, (0, missing)))
    vectors = torch.cat(padded)
    perplexity = min(_PERPLEXITY, (len(vectors) - 1) / 3)  # t-SNE needs 3 neighbours for each
    plane = embed(vectors, perplexity=max(1.0, perplexity), seed=seed, unit=False)
    # the points of a head are its queries, then its keys
    is_key = []
    layers = []
    head_numbers = []
    images = []
    tokens = []
    near = []
    start = 0
    for head in heads:
        queries = len(head.image)
        count = 2 * queries
        is_key.append(torch.arange(count) >= queries)
        layers.append(torch.full((count,), head.alignment.layer))
        head_numbers.append(torch.full((count,), head.alignment.head))
        images.append(head.image.repeat(2))
        tokens.append(head.token.repeat(2))
        points = plane.points[start : start + count]
        near.append(_near(head.products, points, head.image))
        start += count
    return QueryKeyMap(
        points=plane.points,
        is_key=torch.cat(is_key),
        layer=torch.cat(layers),
        head=torch.cat(head_numbers),
        image=torch.cat(images),
        token=torch.cat(tokens),
        alignments=tuple(head.alignment for head in heads),
        near=torch.cat(near),
        trustworthiness=float(plane.trustworthiness),
    )


def _align(
    queries: Float[Tensor, "n head_dim"],
    keys: Float[Tensor, "n head_dim"],
    image: Int[Tensor, " n"],
    layer: int,
    head: int,
) -> tuple[Float[Tensor, "m head_dim"], Alignment]:
    """Return changed queries and keys of one head, as one set of vectors of mean length 1.

    The changes are those of the map: see the top of this module.

    image: the image of each query, and of the key of the same token.
    """
    is_same_image = image[:, None] == image
    products = queries @ keys.T
    before = _correlation(torch.cdist(queries, keys), products, is_same_image)
    best_correlation = before
    best_factor = 1.0
    best_keys = keys
    centred = keys - keys.mean(0)
    for moved_keys in (keys, centred, centred + queries.mean(0)):
        # with this factor, queries and keys are equally long
        balance = float((moved_keys.norm() / queries.norm().clamp_min(_SMALLEST)).sqrt())
        for step in _STEPS:
            factor = step * max(balance, _SMALLEST)
            distances = torch.cdist(factor * queries, moved_keys / factor)
            correlation = _correlation(distances, products, is_same_image)
            if correlation < best_correlation:  # near keys have large products: the best is -1
                best_correlation = correlation
                best_factor = factor
                best_keys = moved_keys
    joined = torch.cat((best_factor * queries, best_keys / best_factor))
    joined = joined - joined.mean(0)
    joined = joined / joined.norm(dim=1).mean().clamp_min(_SMALLEST)
    return joined, Alignment(
        layer=layer, head=head, before=before, after=best_correlation, factor=best_factor
    )


def _correlation(
    distances: Float[Tensor, "query key"],
    products: Float[Tensor, "query key"],
    is_same_image: Bool[Tensor, "query key"],
) -> float:
    """Return Pearson's correlation over pairs of the same image; 0 if one of both is constant.

    The mean over the keys of each query is subtracted, because the softmax compares the keys of one
    query only.
    """
    both = torch.stack((distances, products)) * is_same_image  # (2, query, key)
    means = both.sum(2, keepdim=True) / is_same_image.sum(1)[:, None]
    centred = ((both - means) * is_same_image).flatten(1)
    norms = centred.norm(dim=1)
    if float(norms.min()) < _SMALLEST:
        return 0.0
    return float((centred[0] @ centred[1]) / (norms[0] * norms[1]))


def _near(
    products: Float[Tensor, "n n"], points: Float[Tensor, "m 2"], image: Int[Tensor, " n"]
) -> Float[Tensor, " queries"]:
    """Return 1 for queries with the key of the largest dot product among the nearest, else 0.

    points: the queries, then the keys.
    image: the image of each query, and of the key of the same token.
    """
    queries = len(image)
    distances = torch.cdist(points[:queries], points[queries:])
    results = []
    for number in image.unique():
        members = (image == number).nonzero().flatten()
        if len(members) < _FEWEST:
            continue
        near_count = round(_NEAR * len(members))
        # for each query of the image, its keys in the same image
        nearest = distances[members][:, members].argsort(1)[:, :near_count]
        best = products[members][:, members].argmax(1, keepdim=True)
        results.append((nearest == best).any(1).double())
    if not results:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(results)
