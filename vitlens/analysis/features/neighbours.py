"""Nearest neighbours of features by cosine: k-NN, retrieval, matching patches, few shots.

Similarities are computed in float64, chunk by chunk, and rounded to 12 decimals: the neighbours are
the same for any chunks, most similar first, equal ones by lowest index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.names import WEIGHTINGS, Weighting
from vitlens.shapes import Labels
from vitlens.summary import Summary
from vitlens.uncertainty import Estimate, bootstrap_mean, share_of

TEMPERATURE: Final = 0.07  # DINO's (Caron 2021, appendix F): weight = exp(similarity / temperature)
NEIGHBOURS: Final = 10  # of each patch
WITHIN: Final = 0.125  # of the image's sides: patches at most as far apart lie at the same place
_NUMBERS: Final = 1 << 22  # similarities held at once
_BANK: Final = 1 << 16  # vectors of the bank in a chunk
_UNIT: Final = 1e12  # similarities are whole numbers of 1 / _UNIT

OfPatch = Int[Tensor, " _"]  # one number a patch
Pairs = Bool[Tensor, "patches others"]


@dataclass(frozen=True)
class Neighbours:
    """The k nearest of each query, most similar first, on the device of the features.

    indices: into the bank; similarity: cosines in float64 (that of a zero vector is 0).
    """

    indices: Int[Tensor, "queries k"]
    similarity: Float[Tensor, "queries k"]


def nearest(
    queries: Float[Tensor, "queries dim"],
    bank: Float[Tensor, "bank _"],
    *,
    k: int,
    leave_out: Int[Tensor, " left"] | None = None,
    sources: Int[Tensor, " bank"] | None = None,
) -> Neighbours:
    """Return the k vectors of a bank that are most similar to each query by cosine.

    leave_out: for each query a row of the bank that is the query and is no neighbour, or, with the
    sources of the rows of the bank, a source with rows that are no neighbours; None: nothing is
    left out. k must not exceed the number of vectors that are left. Memory does not grow with the
    bank.
    """
    device = queries.device
    if sources is None:
        sources = torch.arange(len(bank), device=device)
    sources = sources.to(device)
    if leave_out is None:
        leave_out = torch.full((len(queries),), -1, device=device)
    leave_out = leave_out.to(device)
    units = unit_vectors(queries)
    # similarities as whole numbers of 1 / _UNIT
    similarity = torch.zeros(len(queries), 0, dtype=torch.int64, device=device)
    indices = torch.zeros_like(similarity)
    for start in range(0, len(bank), _BANK):
        part = unit_vectors(bank[start : start + _BANK]).T
        part_sources = sources[start : start + _BANK]
        count = part.shape[1]
        # the lowest index has the greatest number
        rank = torch.arange(count - 1, -1, -1, device=device)
        nearest_keys = list[Tensor]()
        for rows in torch.arange(len(queries), device=device).split(max(1, _NUMBERS // count)):
            # a similarity and its index in one whole number, ordered as neighbours are
            keys = (units[rows] @ part * _UNIT).round().long() * _BANK + rank
            is_left_out = leave_out[rows, None] == part_sources
            keys = keys.masked_fill(is_left_out, torch.iinfo(torch.int64).min)
            nearest_keys.append(keys.topk(min(k, count)).values)
        part_keys = torch.cat(nearest_keys)
        part_indices = start + count - 1 - part_keys % _BANK
        similarity = torch.cat((similarity, part_keys // _BANK), 1)
        indices = torch.cat((indices, part_indices), 1)
        # of equal ones that of the earlier chunk
        order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
        similarity = similarity.gather(1, order)
        indices = indices.gather(1, order)
    return Neighbours(indices, similarity.double() / _UNIT)


def unit_vectors(vectors: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Return vectors scaled to length 1, float64; zeros stay zeros."""
    length = vectors.double().norm(dim=-1, keepdim=True)
    units: Tensor = vectors.double() / length.where(length > 0, 1)
    return units


def vote(
    neighbours: Neighbours, labels: Tensor, *, k: int, classes: int, weighting: Weighting = "dino"
) -> Labels:
    """Return the class with most votes among the k nearest; labels: (bank,).

    weighting: "majority" counts each neighbour once, "dino" by exp(similarity / 0.07). Of equal
    classes the lowest wins, as in scikit-learn. Raises InputError for a k above the number of
    neighbours.
    """
    if weighting not in WEIGHTINGS:
        raise UnknownNameError("weighting of neighbours", weighting, WEIGHTINGS)
    if not 1 <= k <= neighbours.indices.shape[1]:
        raise InputError(
            f"expected k from 1 to {neighbours.indices.shape[1]}, the number of neighbours, found "
            f"{k}"
        )
    votes = labels[neighbours.indices[:, :k]]  # (queries, k)
    similarity = neighbours.similarity[:, :k]
    if weighting == "majority":
        weights = torch.ones_like(similarity)
    else:
        weights = (similarity / TEMPERATURE).exp()
    sums = torch.zeros(len(votes), classes, dtype=torch.float64).scatter_add_(1, votes, weights)
    return torch.from_numpy(sums.numpy().argmax(1))  # unlike torch's, the first of equal values


@dataclass(frozen=True, repr=False)
class NearestNeighbours(Summary):
    """The predictions of a k-NN classifier for n test images.

    predictions, correct: (n,).
    accuracy: with its 95 % interval.
    k, weighting: of the votes.
    neighbours: the neighbours of each test image, as indices of the training images.
    """

    predictions: Labels
    correct: Bool[Tensor, " batch"]
    accuracy: Estimate
    k: int
    weighting: Weighting
    neighbours: Neighbours


def knn(
    train: Float[Tensor, "trained dim"],
    train_labels: Tensor,
    test: Float[Tensor, "tested _"],
    test_labels: Labels,
    *,
    k: int = 20,
    weighting: Weighting = "dino",
    groups: Tensor | None = None,
    neighbours: Neighbours | None = None,
) -> NearestNeighbours:
    """Classify test images by the training images with the most similar features (cosine).

    `vitlens features` does the same.

    train, test: features of one layer, such as `vitlens.features(model, images).at(-1)`.
    train_labels, test_labels: class indices.
    k: the number of neighbours that vote.
    weighting: "dino" by exp(similarity / 0.07), "majority" one vote each.
    groups: (tested,) of the test images that share a source, for the interval.
    neighbours: the neighbours of an earlier call with these features and at least this k (None:
        searched).

    Raises InputError for features and labels that do not fit, and for a k above the number of
    training images.

    >>> import vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> train = vitlens.load_data("digits", part="train", limit=40)
    >>> test = vitlens.load_data("digits", part="test", limit=40)
    >>> bank, queries = (vitlens.features(vit, split).at(-1) for split in (train, test))
    >>> vitlens.knn(bank, train.labels, queries, test.labels, k=5).accuracy.n
    40
    """
    require_labelled(train, train_labels, test, test_labels)
    if neighbours is None:
        if not 1 <= k <= len(train):
            raise InputError(
                f"expected k from 1 to {len(train)}, the number of training images, found {k}"
            )
        neighbours = nearest(test, train, k=k)
    classes = 1 + int(torch.cat((train_labels, test_labels)).max())
    predictions = vote(neighbours, train_labels, k=k, classes=classes, weighting=weighting).cpu()
    correct = predictions == test_labels.cpu()
    return NearestNeighbours(
        predictions, correct, accuracy(correct, groups=groups), k, weighting, neighbours
    )


def require_labelled(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor
) -> None:
    """Raise InputError unless these are features (n, dim) of one width, with their labels."""
    _require_part("train", train, train_labels)
    _require_part("test", test, test_labels)
    if train.shape[1] != test.shape[1]:
        raise InputError(
            f"expected training and test features of one width, found {train.shape[1]} and "
            f"{test.shape[1]}; give those of one model and layer"
        )


def _require_part(name: str, features: Tensor, labels: Tensor) -> None:
    """Raise InputError unless these are finite features with one class index an image."""
    if not isinstance(features, Tensor) or features.ndim != 2 or not len(features):
        raise InputError(
            f"expected the {name} features of one layer (images, dim), found {_shape(features)}; "
            "give vitlens.features(model, images).at(-1)"
        )
    is_tensor = isinstance(labels, Tensor)
    if not is_tensor or labels.shape != features.shape[:1] or labels.is_floating_point():
        raise InputError(
            f"expected {name} labels ({len(features)},), class indices, found {_shape(labels)}"
        )
    if not features.isfinite().all():
        raise InputError(
            f"expected finite {name} features, found NaN or infinity; check the model and its "
            "images"
        )
    if int(labels.min()) < 0:
        raise InputError(f"expected {name} labels of 0 or more, found {int(labels.min())}")


def _shape(value: object) -> object:
    """Return the shape of a tensor, or the type of another value, for a message."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def drawn_shots(
    labels: Tensor, *, most: int, draws: int, seed: int = 0
) -> Int[Tensor, "draws classes most"]:
    """Return seeded draws of the same number of training images of every class, in an order.

    The first k of a draw are its k shots, so that fewer shots are a part of more. labels:
    (trained,). Raises DataError for a class with fewer images.
    """
    classes, counts = labels.unique(return_counts=True)
    if int(counts.min()) < most:
        raise DataError(
            f"expected at least {most} training images of every class for {most} shots, found "
            f"{int(counts.min())}; give more images or fewer shots"
        )
    generator = torch.Generator().manual_seed(seed)
    members = [(labels == label).nonzero()[:, 0] for label in classes]
    all_draws = list[Tensor]()
    for _ in range(draws):
        draw = list[Tensor]()
        for images in members:
            order = torch.randperm(len(images), generator=generator)
            draw.append(images[order[:most]])
        all_draws.append(torch.stack(draw))
    return torch.stack(all_draws)


def few_shot(
    train: Float[Tensor, "trained dim"],
    train_labels: Tensor,
    test: Float[Tensor, "tested _"],
    test_labels: Labels,
    *,
    shots: Sequence[int],
    draws: int,
    seed: int = 0,
) -> Float[Tensor, "shots draws"]:
    """Return the accuracy (fraction) of the nearest class mean of a few training images, by draw.

    Accuracy is on the test images. As SimpleShot (Wang 2019): features minus the mean of the drawn
    images, scaled to length 1; the class of which the mean has the highest cosine. The draws are of
    images only: they do not describe the variation between trainings.
    """
    drawn = drawn_shots(train_labels, most=max(shots), draws=draws, seed=seed)
    classes = train_labels.unique()
    accuracies = torch.empty(len(shots), draws, dtype=torch.float64)
    for row, count in enumerate(shots):
        for draw, chosen in enumerate(drawn[:, :, :count]):
            vectors = train[chosen].double()  # (classes, count, dim)
            centre = vectors.mean((0, 1))
            means = unit_vectors(unit_vectors(vectors - centre).mean(1))
            predicted = (unit_vectors(test.double() - centre) @ means.T).argmax(1)
            accuracies[row, draw] = (classes[predicted] == test_labels).double().mean()
    return accuracies


def same_class(
    neighbours: Neighbours, bank_labels: Tensor, labels: Labels, *, k: int
) -> Float[Tensor, " batch"]:
    """Return the precision at k of a retrieval.

    It is the fraction of the k nearest neighbours of each query that are of its class.
    """
    return (bank_labels[neighbours.indices[:, :k]] == labels[:, None]).double().mean(1)


@dataclass(frozen=True)
class Correspondence:
    """Pairs of patches, the most similar first.

    sources, targets: row and column in the first and in the second image; similarity: cosines.
    """

    sources: Int[Tensor, "pairs 2"]
    targets: Int[Tensor, "pairs 2"]
    similarity: Float[Tensor, " pairs"]


def correspond(
    first: Float[Tensor, "rows columns dim"], second: Float[Tensor, "other_rows other_columns _"]
) -> Correspondence:
    """Return pairs of patches of two images that are mutual nearest neighbours by cosine.

    They are the "best buddies" of Amir 2022, of equally near ones the first. Tokens are as
    patch_tokens returns them, of one model and layer.
    """
    first_tokens = first.flatten(0, 1)
    second_tokens = second.flatten(0, 1)
    forwards = nearest(first_tokens, second_tokens, k=1)
    backwards = nearest(second_tokens, first_tokens, k=1)
    returned = backwards.indices[forwards.indices[:, 0], 0]
    is_mutual = returned == torch.arange(len(first_tokens), device=first_tokens.device)
    sources = is_mutual.nonzero()[:, 0]
    order = forwards.similarity[sources, 0].argsort(descending=True, stable=True)
    sources = sources[order]
    targets = forwards.indices[sources, 0]
    return Correspondence(
        _places(sources, first.shape[1]),
        _places(targets, second.shape[1]),
        forwards.similarity[sources, 0],
    )


def _places(patches: Int[Tensor, " pairs"], columns: int) -> Int[Tensor, "pairs 2"]:
    """Return the row and column of patches by their index."""
    return torch.stack((patches // columns, patches % columns), 1)


def patch_neighbours(
    tokens: Float[Tensor, "patches dim"], images: OfPatch, *, k: int = NEIGHBOURS
) -> Neighbours:
    """Return the k patches of other images most similar to each patch.

    Patches of one image resemble each other for any features. images: the image of each patch.
    Raises DataError where an image has fewer than k patches outside it.
    """
    fewest = len(images) - int(torch.bincount(images).max()) if len(images) else 0
    if fewest < k:
        raise DataError(
            f"expected at least {k} patches in other images, found {fewest}; give more images"
        )
    return nearest(tokens, tokens, k=k, leave_out=images, sources=images)


def shared(
    neighbours: Neighbours, alike: Pairs, images: OfPatch, *, seed: int = 0
) -> tuple[Estimate, float]:
    """Return the share of neighbours that are like the patch, and the share by chance.

    The interval is over images; chance is a patch drawn at random from the other images. alike:
    (patches, patches), whether two patches are alike. If neighbours share the position far more
    often than by chance, the features hold mostly the position embedding; if they share object or
    background, they hold content.
    """
    same = alike.gather(1, neighbours.indices).double().mean(1)
    in_other_images = images[:, None] != images
    by_chance = (alike & in_other_images).sum(1) / in_other_images.sum(1)
    estimate = bootstrap_mean(same.numpy(), groups=images.numpy(), seed=seed, least=0.0, most=1.0)
    return estimate, float(by_chance.double().mean())


def near(centres: Float[Tensor, "patches plane"]) -> Pairs:
    """Return which patches lie at the same place of their images.

    Their centres, given in sides of the image, are at most an eighth apart.
    """
    exact = centres.double()
    distances = (exact[:, None] - exact).norm(dim=2)
    is_near: Tensor = distances <= WITHIN + 1e-9  # equal up to rounding
    return is_near


def object_overlap(
    neighbours: Neighbours, on_object: OfPatch, images: OfPatch
) -> tuple[Estimate, float] | None:
    """Segment objects without training, and return the overlap with the patches on objects.

    The overlap is the intersection over union of the patches that lie on the object (1, else 0)
    with those of which the neighbours vote for it, over all patches. By chance it is that where
    every patch is predicted to be on it. Votes are weighted as in k-NN. None where no patch is on
    the object, or none is not.
    """
    if not 0 < int(on_object.sum()) < len(on_object):
        return None
    votes = vote(neighbours, on_object, k=neighbours.indices.shape[1], classes=2)
    both = (votes == 1) & (on_object == 1)
    either = (votes == 1) | (on_object == 1)
    # a ratio of sums over images is a mean over the patches of the union
    estimate = share_of(both[either].numpy(), groups=images[either].numpy())
    return estimate, float(on_object.double().mean())
