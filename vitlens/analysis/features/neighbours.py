"""Nearest neighbours of features by cosine: k-NN, retrieval, matching patches, few shots.

Similarities are computed in float64, chunk by chunk, and rounded to 12 decimals. So the neighbours
do not depend on the chunks. The most similar comes first; of equally similar ones, the one with the
lowest index.
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
NEIGHBOURS: Final = 10  # the default number of neighbours of a patch
# Patches that are at most so far apart count as at the same place. The unit is an image's side.
WITHIN: Final = 0.125
_NUMBERS: Final = 1 << 22  # similarities in memory at once
_BANK: Final = 1 << 16  # vectors of the bank in a chunk
_UNIT: Final = 1e12  # similarities are compared as whole numbers of 1 / _UNIT

OfPatch = Int[Tensor, " _"]  # one number per patch
Pairs = Bool[Tensor, "patches others"]  # True or False for every pair of patches


@dataclass(frozen=True)
class Neighbours:
    """The k nearest neighbours of each query, most similar first, on the device of the features.

    indices (queries, k): the index of each neighbour in the bank.
    similarity (queries, k): its cosine with the query, float64. The cosine of a zero vector is 0.
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

    Memory does not grow with the bank.

    k: the number of neighbours. It must not exceed the number of vectors that may be neighbours.
    leave_out (queries,): for each query the source whose vectors are no neighbours of it; None
        leaves nothing out.
    sources (bank,): the source of each vector of the bank; None for its index. So without sources,
        `leave_out` holds the index of one vector for each query, such as the query itself.
    """
    device = queries.device
    if sources is None:
        sources = torch.arange(len(bank), device=device)
    if leave_out is None:
        no_source = -1
        leave_out = torch.full((len(queries),), no_source, device=device)
    sources = sources.to(device)
    leave_out = leave_out.to(device)
    units = unit_vectors(queries)
    # both (queries, k), the best of all chunks so far: similarities in whole numbers of 1 / _UNIT
    similarity = torch.zeros(len(queries), 0, dtype=torch.int64, device=device)
    indices = torch.zeros_like(similarity)
    for start in range(0, len(bank), _BANK):
        chunk_similarity, chunk_places = _nearest_in_chunk(
            units,
            unit_vectors(bank[start : start + _BANK]),
            k=k,
            leave_out=leave_out,
            sources=sources[start : start + _BANK],
        )
        similarity = torch.cat((similarity, chunk_similarity), 1)
        indices = torch.cat((indices, start + chunk_places), 1)
        # the sort is stable: equally similar vectors of an earlier chunk stay in front
        order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
        similarity = similarity.gather(1, order)
        indices = indices.gather(1, order)
    return Neighbours(indices, similarity.double() / _UNIT)


def _nearest_in_chunk(
    queries: Float[Tensor, "queries dim"],
    chunk: Float[Tensor, "chunk _"],
    *,
    k: int,
    leave_out: Int[Tensor, " queries"],
    sources: Int[Tensor, " chunk"],
) -> tuple[Int[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Return the similarities of the nearest vectors of a chunk, and their places in the chunk.

    Vectors have length 1. Similarities are whole numbers of 1 / _UNIT. A chunk of fewer than k
    vectors gives fewer columns.
    """
    count = len(chunk)
    # Similarity and place share one whole number, similarity * _BANK + rank, so that one topk finds
    # the nearest and also decides between equal ones: the first place has the highest rank.
    rank = torch.arange(count - 1, -1, -1, device=queries.device)
    keys_of_nearest = list[Tensor]()
    for rows in torch.arange(len(queries), device=queries.device).split(max(1, _NUMBERS // count)):
        similarity = (queries[rows] @ chunk.T * _UNIT).round().long()
        keys = similarity * _BANK + rank
        is_left_out = leave_out[rows, None] == sources
        keys = keys.masked_fill(is_left_out, torch.iinfo(torch.int64).min)
        keys_of_nearest.append(keys.topk(min(k, count)).values)
    keys = torch.cat(keys_of_nearest)
    # % and // round down, also for negative similarities, so they invert the sum above
    places = count - 1 - keys % _BANK
    return keys // _BANK, places


def unit_vectors(vectors: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Return vectors scaled to length 1, float64; a zero vector stays zero."""
    length = vectors.double().norm(dim=-1, keepdim=True)
    units: Tensor = vectors.double() / length.where(length > 0, 1)
    return units


def vote(
    neighbours: Neighbours, labels: Tensor, *, k: int, classes: int, weighting: Weighting = "dino"
) -> Labels:
    """Return the class of each query that has most votes among its k nearest neighbours.

    If classes have equally many votes, the lowest wins, as in scikit-learn.

    labels (bank,): the class of each vector of the bank, on any device. Predictions are on the CPU.
    classes: the number of classes.
    weighting: "majority" gives each neighbour one vote, "dino" exp(similarity / 0.07) votes.

    Raises InputError for a k above the number of neighbours.
    """
    if weighting not in WEIGHTINGS:
        raise UnknownNameError("weighting of neighbours", weighting, WEIGHTINGS)
    if not 1 <= k <= neighbours.indices.shape[1]:
        raise InputError(
            f"expected k from 1 to {neighbours.indices.shape[1]}, the number of neighbours, found "
            f"{k}"
        )
    votes = labels.cpu()[neighbours.indices[:, :k].cpu()]  # (queries, k)
    similarity = neighbours.similarity[:, :k].cpu()
    if weighting == "majority":
        weights = torch.ones_like(similarity)
    else:
        weights = (similarity / TEMPERATURE).exp()
    sums = torch.zeros(len(votes), classes, dtype=torch.float64).scatter_add_(1, votes, weights)
    # numpy's argmax returns the first of equal values; torch's may return any of them
    return torch.from_numpy(sums.numpy().argmax(1))


@dataclass(frozen=True, repr=False)
class NearestNeighbours(Summary):
    """The predictions of a k-NN classifier for n test images.

    predictions (n,): the predicted class of each image.
    correct (n,): True if the prediction is the label.
    accuracy: the accuracy with its 95 % interval.
    k: the number of neighbours that vote.
    weighting: the weights of their votes.
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
    train_labels, test_labels: the class index of each image.
    k: the number of neighbours that vote.
    weighting: "majority" gives each neighbour one vote, "dino" exp(similarity / 0.07) votes.
    groups (tested,): the source of each test image, for the interval.
    neighbours: the neighbours from an earlier call with these features and at least this k; None
        searches for them.

    Raises InputError for features and labels that do not fit, and for a k above the number of
    training images.

    >>> import vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> train = vitlens.load_data("digits", part="train", limit=40)
    >>> test = vitlens.load_data("digits", part="test", limit=40)
    >>> bank = vitlens.features(vit, train).at(-1)
    >>> queries = vitlens.features(vit, test).at(-1)
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
    classes = 1 + max(int(train_labels.max()), int(test_labels.max()))
    predictions = vote(neighbours, train_labels, k=k, classes=classes, weighting=weighting)
    correct = predictions == test_labels.cpu()
    return NearestNeighbours(
        predictions=predictions,
        correct=correct,
        accuracy=accuracy(correct, groups=groups),
        k=k,
        weighting=weighting,
        neighbours=neighbours,
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
    """Raise InputError unless these are finite features with one class index per image."""
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
    """Return seeded random draws of `most` training images of every class, as indices.

    The first k images of a class are its k shots. So the shots of a smaller k are part of those of
    a larger k.

    labels (trained,): the class of each training image.

    Raises DataError for a class with fewer than `most` images.
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
    """Return the accuracy on test images of a classifier that has a few training images per class.

    The classifier is SimpleShot (Wang 2019). It subtracts the mean of the drawn training images
    from all features and scales them to length 1. It predicts the class whose mean has the highest
    cosine.

    shots: the numbers of training images per class.
    draws: the number of random draws of training images. They show how accuracy varies with the
        images, not with the training of the model.

    Returns a fraction for each number of shots and each draw.
    """
    drawn = drawn_shots(train_labels, most=max(shots), draws=draws, seed=seed)
    classes = train_labels.unique()
    accuracies = torch.empty(len(shots), draws, dtype=torch.float64)
    for row, count in enumerate(shots):
        for draw, chosen in enumerate(drawn[:, :, :count]):
            vectors = train[chosen].double()  # (classes, count, dim)
            centre = vectors.mean((0, 1))
            class_means = unit_vectors(vectors - centre).mean(1)
            cosines = unit_vectors(test.double() - centre) @ unit_vectors(class_means).T
            predicted = classes[cosines.argmax(1)]
            accuracies[row, draw] = (predicted == test_labels).double().mean()
    return accuracies


def same_class(
    neighbours: Neighbours, bank_labels: Tensor, labels: Labels, *, k: int
) -> Float[Tensor, " batch"]:
    """Return the precision at k of a retrieval, for each query.

    It is the fraction of the k nearest neighbours that have the class of the query.
    """
    neighbour_labels = bank_labels[neighbours.indices[:, :k]]  # (queries, k)
    return (neighbour_labels == labels[:, None]).double().mean(1)


@dataclass(frozen=True)
class Correspondence:
    """Pairs of patches of two images, the most similar first.

    sources (pairs, 2): the row and column of the patch in the first image.
    targets (pairs, 2): the row and column of the patch in the second image.
    similarity (pairs,): the cosine of both.
    """

    sources: Int[Tensor, "pairs 2"]
    targets: Int[Tensor, "pairs 2"]
    similarity: Float[Tensor, " pairs"]


def correspond(
    first: Float[Tensor, "rows columns dim"], second: Float[Tensor, "other_rows other_columns _"]
) -> Correspondence:
    """Return pairs of patches of two images that are mutual nearest neighbours by cosine.

    They are the "best buddies" of Amir 2022.

    first, second: the tokens of one layer at each image, as `patch_tokens` returns them.
    """
    first_tokens = first.flatten(0, 1)
    second_tokens = second.flatten(0, 1)
    forwards = nearest(first_tokens, second_tokens, k=1)
    backwards = nearest(second_tokens, first_tokens, k=1)
    partners = forwards.indices[:, 0]  # of each first patch, in the second image
    similarity = forwards.similarity[:, 0]
    partners_of_partners = backwards.indices[partners, 0]
    patches = torch.arange(len(first_tokens), device=first_tokens.device)
    sources = (partners_of_partners == patches).nonzero()[:, 0]
    sources = sources[similarity[sources].argsort(descending=True, stable=True)]
    return Correspondence(
        sources=_places(sources, first.shape[1]),
        targets=_places(partners[sources], second.shape[1]),
        similarity=similarity[sources],
    )


def _places(patches: Int[Tensor, " pairs"], columns: int) -> Int[Tensor, "pairs 2"]:
    """Return the row and column of patches, from their index in a grid with so many columns."""
    return torch.stack((patches // columns, patches % columns), 1)


def patch_neighbours(
    tokens: Float[Tensor, "patches dim"], images: OfPatch, *, k: int = NEIGHBOURS
) -> Neighbours:
    """Return the k patches of other images that are most similar to each patch.

    Patches of the same image are left out, because they resemble each other for any features.

    images (patches,): the image of each patch.

    Raises DataError if some image has fewer than k patches outside it.
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
    """Return the share of neighbours that are alike their patch, and the share by chance.

    Patches may be alike in position or in class, for example. If neighbours have the same position
    far more often than by chance, features hold mostly the position embedding. If they have the
    same class, features hold content. Chance is a random patch of the other images. The interval is
    over images.

    alike (patches, patches): True for each pair of patches that are alike.
    images (patches,): the image of each patch.
    """
    alike_share = alike.gather(1, neighbours.indices).double().mean(1)  # for each patch
    in_other_image = images[:, None] != images
    by_chance = (alike & in_other_image).sum(1) / in_other_image.sum(1)
    estimate = bootstrap_mean(
        alike_share.numpy(), groups=images.numpy(), seed=seed, least=0.0, most=1.0
    )
    return estimate, float(by_chance.double().mean())


def near(centres: Float[Tensor, "patches plane"]) -> Pairs:
    """Return True for each pair of patches that lie at the same place of their images.

    Their centres are at most WITHIN apart.

    centres (patches, 2): the centre of each patch, in sides of the image.
    """
    exact = centres.double()
    distances = (exact[:, None] - exact).norm(dim=2)
    rounding = 1e-9  # so that a distance of exactly WITHIN counts
    is_near: Tensor = distances <= WITHIN + rounding
    return is_near


def object_overlap(
    neighbours: Neighbours, on_object: OfPatch, images: OfPatch
) -> tuple[Estimate, float] | None:
    """Segment objects without training, and return the overlap with the objects and by chance.

    A patch is predicted to lie on an object if its neighbours vote for it, with the weights of
    k-NN. The overlap is the intersection over union of the predicted patches and those that lie on
    an object, over all images. By chance all patches are predicted to lie on one. None if no patch
    lies on an object, or all do.

    on_object (patches,): 1 for patches on an object, else 0.
    images (patches,): the image of each patch.
    """
    if not 0 < int(on_object.sum()) < len(on_object):
        return None
    votes = vote(neighbours, on_object, k=neighbours.indices.shape[1], classes=2)
    intersection = (votes == 1) & (on_object == 1)
    union = (votes == 1) | (on_object == 1)
    # the intersection over union is the share of the union's patches that are in the intersection
    estimate = share_of(intersection[union].numpy(), groups=images[union].numpy())
    return estimate, float(on_object.double().mean())
