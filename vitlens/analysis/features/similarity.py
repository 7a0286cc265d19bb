"""Similarity of layers of one model or of two: CKA, and rank correlation of image distances."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from vitlens.analysis.features.cka import FEWEST, CKAStream, Matrix
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.neighbours import unit_vectors
from vitlens.errors import InputError
from vitlens.summary import Summary

_AT_ONCE = 1024  # images that are added to a stream at a time
GROUPS = 10  # groups of images for the interval; each is left out in turn
MOST_IMAGES = 1000  # distances are ranked for at most so many images: half a million pairs


@dataclass(frozen=True, repr=False)
class Similarity(Summary):
    """The similarity of every layer of one model with every layer of another, or of its own.

    values (layers of the first, layers of the second): the similarities, float64. NaN if the
        features of a layer do not vary.
    n: the number of images.
    low, high: the ends of the 95 % interval over images, None if it is not defined.
    """

    values: Matrix
    n: int
    low: Matrix | None = None
    high: Matrix | None = None


def similarity(
    first: Features,
    second: Features | None = None,
    *,
    biased: bool = False,
    groups: int = GROUPS,
    sources: Tensor | None = None,
    seed: int = 0,
) -> Similarity:
    """Compute linear CKA of every pair of layers of two models, or of one model with itself.

    CKA is 1 for the same features up to rotation, scale and shift. It is about 0, possibly below,
    for unrelated features. The interval is a jackknife over random groups of images. It takes at
    least 4 images per group.

    first, second: the features of two models at the same images; without a second, the first is
        compared with itself.
    biased: True to use the biased estimator of HSIC, see vitlens.analysis.features.cka.
    groups: the number of groups of images for the interval.
    sources (n,): the source of each image; images of one source are in one group.
    seed: the seed of the groups.

    Raises InputError for fewer than 4 images, or different numbers of images.

    >>> import torch, vitlens
    >>> images = torch.rand(8, 3, 32, 32)
    >>> vit, cnn = vitlens.load("vit-digits"), vitlens.load("cnn-digits")
    >>> cka = vitlens.similarity(vitlens.features(vit, images), vitlens.features(cnn, images))
    >>> cka.values.shape  # layers of the first, layers of the second
    torch.Size([6, 3])
    """
    _require_same(first, second)
    stream = CKAStream()
    _add(stream, first, second, torch.arange(len(first)))
    values = stream.cka(biased=biased)
    source_of_image = torch.arange(len(first))  # numbers from 0
    if sources is not None:
        _, source_of_image = sources.cpu().unique(return_inverse=True)
    count = int(source_of_image.max()) + 1
    groups = min(groups, len(first) // FEWEST, count)
    if groups < 2:
        return Similarity(values, n=len(first))
    shuffled_sources = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    jackknife = list[Matrix]()  # for each group, CKA without it
    for left_out_sources in shuffled_sources.chunk(groups):
        images = left_out_sources  # without sources, each image is one
        if sources is not None:
            images = torch.isin(source_of_image, left_out_sources).nonzero()[:, 0]
        removed = CKAStream()
        removed.centres = stream.centres  # `without` needs the same centres
        _add(removed, first, second, images)
        jackknife.append(stream.without(removed).cka(biased=biased))
    estimates = torch.stack(jackknife)
    parts = len(estimates)
    squares = (estimates - estimates.mean(0)).square().sum(0)
    error = ((parts - 1) / parts * squares).sqrt()  # the jackknife's standard error
    half_width = float(stats.t.ppf(0.975, parts - 1)) * error
    least = 0.0 if biased else -1.0  # the biased estimator is never negative
    low = (values - half_width).clamp_min(least)
    high = (values + half_width).clamp_max(1.0)
    return Similarity(values, n=len(first), low=low, high=high)


def distance_correlation(
    first: Features, second: Features | None = None, *, limit: int = MOST_IMAGES, seed: int = 0
) -> Similarity:
    """Compute the representational similarity of every pair of layers (Kriegeskorte 2008).

    It is Spearman's correlation of the distances between images, 1 - cosine. If there are more than
    `limit` images, a random sample of them is taken.

    Raises InputError for fewer than 4 images, or different numbers of images.
    """
    _require_same(first, second)
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))
    sample = order[:limit].sort().values
    first_ranks = [_ranks(values[sample]) for values in first.values]
    second_ranks = first_ranks
    if second is not None:
        second_ranks = [_ranks(values[sample]) for values in second.values]
    # the dot product of centred ranks of length 1 is their correlation
    correlations = torch.stack(first_ranks) @ torch.stack(second_ranks).T
    return Similarity(correlations, n=len(sample))


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of the distances of all pairs of images, centred and scaled to length 1.

    They are NaN if all distances are equal.

    values (images, dim): the features of one layer.
    """
    units = unit_vectors(values)
    rows, columns = torch.triu_indices(len(values), len(values), 1)  # each pair of images once
    # rounded so that equal distances share a rank
    cosines = (units @ units.T)[rows, columns].round(decimals=12)
    ranks = torch.from_numpy(np.asarray(stats.rankdata(-cosines.numpy())))
    centred = ranks - ranks.mean()
    unit: Tensor = centred / centred.norm()
    return unit


def _add(stream: CKAStream, first: Features, second: Features | None, images: Tensor) -> None:
    """Add the features of some images, by their indices, to a stream."""
    for batch in images.split(_AT_ONCE):
        first_batch = [values[batch] for values in first.values]
        second_batch = None
        if second is not None:
            second_batch = [values[batch] for values in second.values]
        stream.add(first_batch, second_batch)


def _require_same(first: Features, second: Features | None) -> None:
    """Raise InputError unless these are features of the same number of images, at least 4."""
    other = first if second is None else second
    for features in (first, other):
        if not isinstance(features, Features):
            name = type(features).__name__  # type: ignore[unreachable]  # an untyped call
            raise InputError(
                f"expected what vitlens.features(model, images) gives, found {name}; call it for "
                "each model"
            )
    if len(first) != len(other):
        raise InputError(
            f"expected the same images of both models, found {len(first)} and {len(other)}"
        )
    if len(first) < FEWEST:
        raise InputError(
            f"expected at least {FEWEST} images to compare layers on, found {len(first)}; give more"
        )
