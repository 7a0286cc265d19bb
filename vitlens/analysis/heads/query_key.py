"""Queries and keys of heads: the product of a pair by dimension, and all of them in one map.

The map follows AttentionViz (Yeh 2023): distances stand for attention after two changes that leave
the weights as they are. A vector is added to all keys, which adds the same to all scores of a
query; and queries are multiplied by a factor by which keys are divided. Of a few vectors and
factors, those are taken with which distances correlate best with dot products over the keys of a
query.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

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
_DRAWS: Final = 50  # of as many other dimensions
# factors of the queries, times that with which queries and keys are equally long; with far larger
# ones all keys lie in one place
_STEPS: Final = (0.5, 0.71, 1.0, 1.41, 2.0)
_SMALLEST: Final = 1e-12  # length that is divided by
_NEAR: Final = 0.1  # of the keys of an image, the nearest of a query in the map
_FEWEST: Final = 20  # keys of an image, from which the nearest are counted
_POINTS: Final = 600


@dataclass(frozen=True, repr=False)
class Neurons(Summary):
    """The score of one query and one key of a head, by dimension; tensors on the CPU.

    query, key: positions of the tokens.
    query_patch, key_patch: (row, column), None for a prefix token.
    query_values, key_values: (head_dim,).
    products: the products of both, scaled: their sum and the bias are the score.
    weight: after the softmax.
    without: the weight with the TOP dimensions of the largest products set to zero in the query.
    control: the mean weight with as many other ones.
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

    before, after: correlation of distance and dot product over the keys of a query, with the
        vectors as they are, and changed.
    factor: that of the queries.
    """

    layer: int
    head: int
    before: float
    after: float
    factor: float


@dataclass(frozen=True, repr=False)
class QueryKeyMap(Summary):
    """Queries and keys of heads in one plane (t-SNE); tensors on the CPU.

    points: (n, 2), the queries of a head and then its keys.
    is_key, layer, head, image, token: of each point.
    alignments: by head.
    near: of each query whose image has enough keys, 1 if the key with its largest dot product is
        among the nearest tenth in the map.
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

    query, key: patches (row, column) (None: CLS or the middle patch, and the patch to which it
        attends most).
    seed: the seed of the other dimensions that are set to zero.

    Raises InputError for another number of images and a head or patch that is not there,
    UnsupportedError for a layer without queries and keys of the whole image.

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
    assert inputs is not None
    position = _position(query, geometry, geometry.cls[0] if geometry.cls else None)
    if position is None:
        position = geometry.prefix + geometry.patches // 2
    scores = inputs.scores([position])[0, head, 0].double()
    weights = scores.softmax(-1)
    chosen = _position(key, geometry, geometry.prefix + int(weights[geometry.prefix :].argmax()))
    assert chosen is not None
    query_values = inputs.query[0, head, position].double()
    keys = inputs.key[0, head].double()
    products = query_values * keys[chosen] * inputs.scale
    bias = scores - (keys @ query_values) * inputs.scale
    top = products.argsort(descending=True, stable=True)[:TOP]
    others = [index for index in range(len(products)) if index not in set(top.tolist())]
    generator = torch.Generator().manual_seed(seed)
    controls = []
    for _ in range(_DRAWS if len(others) >= TOP else 0):
        drawn = torch.randperm(len(others), generator=generator)[:TOP]
        dropped = torch.tensor(others)[drawn]
        controls.append(_weight_without(dropped, query_values, keys, inputs.scale, bias, chosen))
    return Neurons(
        layer=layer,
        head=head,
        query=position,
        key=chosen,
        query_patch=_patch(position, geometry),
        key_patch=_patch(chosen, geometry),
        query_values=query_values.cpu(),
        key_values=keys[chosen].cpu(),
        products=products.cpu(),
        bias=float(bias[chosen]),
        weight=float(weights[chosen]),
        without=_weight_without(top, query_values, keys, inputs.scale, bias, chosen),
        control=sum(controls) / len(controls) if controls else float("nan"),
    )


def _weight_without(
    dropped: Int[Tensor, " some"],
    query: Float[Tensor, " head_dim"],
    keys: Float[Tensor, "key head_dim"],
    scale: float,
    bias: Float[Tensor, " key"],
    key: int,
) -> float:
    """Return the weight of a key with some dimensions of the query set to zero."""
    reduced = query.clone()
    reduced[dropped.to(reduced.device)] = 0.0
    return float(((keys @ reduced) * scale + bias).softmax(-1)[key])


def _position(
    patch: tuple[int, int] | None, geometry: Geometry, otherwise: int | None
) -> int | None:
    """Return the position of a patch among the tokens.

    Raises InputError for one that is not there.
    """
    if patch is None:
        return otherwise
    rows, columns = geometry.grid
    row, column = patch
    if not (0 <= row < rows and 0 <= column < columns):
        raise InputError(
            f"expected a patch from 0,0 to {rows - 1},{columns - 1}, found {row},{column}"
        )
    return geometry.prefix + row * columns + column


def _patch(position: int, geometry: Geometry) -> tuple[int, int] | None:
    if position < geometry.prefix:
        return None
    row, column = divmod(position - geometry.prefix, geometry.grid[1])
    return row, column


def _require_head(
    model: Model, calls: Mapping[int, tuple[AttentionCall, Geometry]], layer: int, head: int
) -> None:
    """Raise InputError for a head that is not there."""
    if layer not in calls:
        raise InputError(
            f"expected a layer of {', '.join(map(str, calls))} of {model.alias}, found {layer}"
        )
    heads = calls[layer][0].site.heads
    if not 0 <= head < heads:
        raise InputError(
            f"expected a head from 0 to {heads - 1} in layer {layer} of {model.alias}, found {head}"
        )


def _calls(model: Model, images: Images) -> dict[int, tuple[AttentionCall, Geometry]]:
    """Return the layers in which all tokens have queries and keys, by their numbers.

    Raises UnsupportedError for a model without such a layer.
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

    heads: (layer, head) pairs, all by default.
    points: at most so many, of tokens drawn by the seed, the same for all heads. Vectors of
        different heads have unrelated axes: compare distances within a head.

    Raises InputError for a head that is not there and for too few points, UnsupportedError for a
    model without queries and keys of the whole image.

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
    points_per_head = points // (2 * len(chosen_heads))
    if points_per_head < 2:
        raise InputError(
            f"expected at least {4 * len(chosen_heads)} points for {len(chosen_heads)} heads, "
            f"found {points}"
        )
    vectors = []
    products = []
    alignments = []
    columns = []
    for layer, head in chosen_heads:
        call, _ = calls[layer]
        assert call.inputs is not None
        tokens = call.inputs.query.shape[2]
        order = torch.randperm(len(batch) * tokens, generator=torch.Generator().manual_seed(seed))
        drawn = order[:points_per_head].sort().values
        queries = call.inputs.query[:, head].flatten(0, 1)[drawn.to(batch.device)].double().cpu()
        keys = call.inputs.key[:, head].flatten(0, 1)[drawn.to(batch.device)].double().cpu()
        image = drawn // tokens
        aligned, alignment = _align(queries, keys, image, layer, head)
        vectors.append(aligned)
        products.append(queries @ keys.T)
        alignments.append(alignment)
        is_key = torch.arange(2 * len(drawn)) >= len(drawn)
        columns.append(
            torch.stack(
                (
                    is_key.long(),
                    torch.full_like(is_key, layer, dtype=torch.long),
                    torch.full_like(is_key, head, dtype=torch.long),
                    image.repeat(2),
                    (drawn % tokens).repeat(2),
                )
            )
        )
    return _map_vectors(vectors, products, alignments, torch.cat(columns, 1), seed)


def _map_vectors(
    vectors: list[Tensor],
    products: list[Tensor],
    alignments: list[Alignment],
    columns: Int[Tensor, "5 n"],
    seed: int,
) -> QueryKeyMap:
    """Return the map of the vectors of all heads.

    products: (query, key) of each head.
    columns: whether a key, layer, head, image and token of each point.
    """
    widest = max(part.shape[1] for part in vectors)
    padded = [torch.nn.functional.pad(part, (0, widest - part.shape[1])) for part in vectors]
    plane = embed(
        torch.cat(padded), perplexity=_perplexity(columns.shape[1]), seed=seed, unit=False
    )
    near = []
    start = 0
    for of_head in products:
        count = 2 * len(of_head)
        points = plane.points[start : start + count]
        image = columns[3, start : start + len(of_head)]
        near.append(_near(of_head, points, image))
        start += count
    return QueryKeyMap(
        points=plane.points,
        is_key=columns[0].bool(),
        layer=columns[1],
        head=columns[2],
        image=columns[3],
        token=columns[4],
        alignments=tuple(alignments),
        near=torch.cat(near),
        trustworthiness=float(plane.trustworthiness),
    )


def _perplexity(points: int) -> float:
    return max(1.0, min(30.0, (points - 1) / 3))


def _align(
    queries: Float[Tensor, "n head_dim"],
    keys: Float[Tensor, "n head_dim"],
    image: Int[Tensor, " n"],
    layer: int,
    head: int,
) -> tuple[Float[Tensor, "m head_dim"], Alignment]:
    """Return queries and moved, scaled keys as one set of vectors with a mean length of one."""
    same = image[:, None] == image
    products = queries @ keys.T
    before = _correlation(torch.cdist(queries, keys), products, same)
    after = before
    factor = 1.0
    moved = keys
    centred = keys - keys.mean(0)
    for candidate in (keys, centred, centred + queries.mean(0)):
        balance = float((candidate.norm() / queries.norm().clamp_min(_SMALLEST)).sqrt())
        for step in _STEPS:
            tried = step * max(balance, _SMALLEST)
            distances = torch.cdist(tried * queries, candidate / tried)
            correlation = _correlation(distances, products, same)
            if correlation < after:
                after = correlation
                factor = tried
                moved = candidate
    joined = torch.cat((factor * queries, moved / factor))
    joined = joined - joined.mean(0)
    joined = joined / joined.norm(dim=1).mean().clamp_min(_SMALLEST)
    return joined, Alignment(layer, head, before, after, factor)


def _correlation(
    distances: Float[Tensor, "query key"],
    products: Float[Tensor, "query key"],
    same: Bool[Tensor, "query key"],
) -> float:
    """Return Pearson's correlation over the keys of a query's image, 0 where one is constant.

    The mean of each query is subtracted: the softmax compares the keys of one query only.
    """
    both = torch.stack((distances, products)) * same
    both = (both - both.sum(2, keepdim=True) / same.sum(1)[:, None]) * same
    both = both.flatten(1)
    norms = both.norm(dim=1)
    if float(norms.min()) < _SMALLEST:
        return 0.0
    return float((both[0] @ both[1]) / (norms[0] * norms[1]))


def _near(
    products: Float[Tensor, "n n"], points: Float[Tensor, "m 2"], image: Int[Tensor, " n"]
) -> Float[Tensor, " queries"]:
    """Return for each query whether the key with its largest dot product is among the nearest."""
    count = len(image)
    distances = torch.cdist(points[:count], points[count:])
    found = []
    for number in image.unique():
        members = (image == number).nonzero().flatten()
        if len(members) < _FEWEST:
            continue
        nearest = distances[members][:, members].argsort(1)[:, : round(_NEAR * len(members))]
        best = products[members][:, members].argmax(1, keepdim=True)
        found.append((nearest == best).any(1).double())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
