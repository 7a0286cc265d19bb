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

_AT_ONCE = 1024  # images added at a time
GROUPS = 10  # of images, each left out in turn for the interval
MOST_IMAGES = 1000  # of which distances are ranked: half a million pairs


@dataclass(frozen=True, repr=False)
class Similarity(Summary):
    """The similarity of layers: values (layers of the first, layers of the second), float64.

    NaN where the features of a layer do not vary.

    low, high: the 95 % interval over images, or None where none is defined.
    n: images.
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

    The images must be the same. The unbiased HSIC estimator is used, or with biased the biased one;
    see vitlens.analysis.features.cka. CKA is 1 for the same features up to rotation, scale and
    shift, about 0 (possibly below) for unrelated ones. The interval is a jackknife over seeded
    groups of images (none with fewer than 4 images a group). sources (n,): of the images; those of
    one source are in one group. Raises InputError for fewer than 4 images, or different numbers of
    images.

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
    if sources is None:
        source = torch.arange(len(first))
    else:
        source = sources.cpu().unique(return_inverse=True)[1]
    count = int(source.max()) + 1
    groups = min(groups, len(first) // FEWEST, count)
    if groups < 2:
        return Similarity(values, len(first))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    jackknife = list[Matrix]()
    for drawn in order.chunk(groups):
        members = drawn if sources is None else torch.isin(source, drawn).nonzero()[:, 0]
        removed = CKAStream()
        removed.centres = stream.centres
        _add(removed, first, second, members)
        jackknife.append(stream.without(removed).cka(biased=biased))
    parts = len(jackknife)
    estimates = torch.stack(jackknife)
    squares = (estimates - estimates.mean(0)).square().sum(0)
    error = ((parts - 1) / parts * squares).sqrt()
    half = float(stats.t.ppf(0.975, parts - 1)) * error
    least = 0.0 if biased else -1.0
    low = (values - half).clamp_min(least)
    high = (values + half).clamp_max(1.0)
    return Similarity(values, len(first), low, high)


def distance_correlation(
    first: Features, second: Features | None = None, *, limit: int = MOST_IMAGES, seed: int = 0
) -> Similarity:
    """Compute the representational similarity of every pair of layers (Kriegeskorte 2008).

    It is Spearman's correlation of the distances between images, 1 - cosine. Of more than limit
    images a seeded sample is taken. Raises InputError for fewer than 4 images, or different numbers
    of images.
    """
    _require_same(first, second)
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))
    chosen = order[:limit].sort().values
    first_ranks = [_ranks(values[chosen]) for values in first.values]
    second_ranks = first_ranks
    if second is not None:
        second_ranks = [_ranks(values[chosen]) for values in second.values]
    return Similarity(torch.stack(first_ranks) @ torch.stack(second_ranks).T, len(chosen))


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of the distances of all pairs, centred and of length 1.

    NaN where all are equal.
    """
    units = unit_vectors(values)
    rows, columns = torch.triu_indices(len(values), len(values), 1)
    # rounded so that equal distances share a rank
    cosines = (units @ units.T)[rows, columns].round(decimals=12)
    ranks = torch.from_numpy(np.asarray(stats.rankdata(-cosines.numpy())))
    centred = ranks - ranks.mean()
    unit: Tensor = centred / centred.norm()
    return unit


def _add(stream: CKAStream, first: Features, second: Features | None, images: Tensor) -> None:
    for batch in images.split(_AT_ONCE):
        first_batch = [values[batch] for values in first.values]
        second_batch = None
        if second is not None:
            second_batch = [values[batch] for values in second.values]
        stream.add(first_batch, second_batch)


def _require_same(first: Features, second: Features | None) -> None:
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
