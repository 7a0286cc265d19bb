"""Similarity of layers of one model or of two: CKA, and the rank correlation of the distances
between images.
"""

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
MOST_IMAGES = 1000  # whose distances are ranked: half a million pairs


@dataclass(frozen=True, repr=False)
class Similarity(Summary):
    """values (layers of the first, layers of the second), float64; NaN where a layer's features do
    not vary.

    low, high: the 95 % interval over images, or None where none is defined; n: images.
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
    """Linear CKA of every pair of layers of two models on the same images, or of one model with
    itself.

    With the unbiased HSIC estimator, or with biased the biased one; see
    vitlens.analysis.features.cka. 1 for the same features up to rotation, scale and shift, about 0
    (possibly below) for unrelated ones. The interval is a jackknife over seeded groups of images
    (none with fewer than 4 images a group). sources (n,): what images share; those of one source
    are in one group. Raises InputError for fewer than 4 images, or different numbers of images.

    >>> import torch, vitlens
    >>> images = torch.rand(8, 3, 32, 32)
    >>> vit, cnn = vitlens.load("vit-digits"), vitlens.load("cnn-digits")
    >>> cka = vitlens.similarity(vitlens.features(vit, images), vitlens.features(cnn, images))
    >>> cka.values.shape  # layers of the first, layers of the second
    torch.Size([6, 3])
    """
    _require_same(first, second)
    whole = CKAStream()
    _take(whole, first, second, torch.arange(len(first)))
    values = whole.cka(biased=biased)
    source = (
        torch.arange(len(first))
        if sources is None
        else sources.cpu().unique(return_inverse=True)[1]
    )
    count = int(source.max()) + 1
    groups = min(groups, len(first) // FEWEST, count)
    if groups < 2:
        return Similarity(values, len(first))
    left = []
    for drawn in torch.randperm(count, generator=torch.Generator().manual_seed(seed)).chunk(groups):
        members = drawn if sources is None else torch.isin(source, drawn).nonzero()[:, 0]
        part = CKAStream()
        part.centres = whole.centres
        _take(part, first, second, members)
        left.append(whole.without(part).cka(biased=biased))
    others = torch.stack(left)
    error = ((len(left) - 1) / len(left) * (others - others.mean(0)).square().sum(0)).sqrt()
    half = float(stats.t.ppf(0.975, len(left) - 1)) * error
    least = 0.0 if biased else -1.0
    return Similarity(
        values, len(first), (values - half).clamp_min(least), (values + half).clamp_max(1.0)
    )


def distance_correlation(
    first: Features, second: Features | None = None, *, limit: int = MOST_IMAGES, seed: int = 0
) -> Similarity:
    """Representational similarity: Spearman's correlation of the distances between images
    (Kriegeskorte 2008).

    For every pair of layers; the distance is 1 - cosine. Of more than limit images a seeded sample
    is taken. Raises InputError for fewer than 4 images, or different numbers of images.
    """
    _require_same(first, second)
    chosen = (
        torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))[:limit]
        .sort()
        .values
    )
    first_ranks = [_ranks(values[chosen]) for values in first.values]
    second_ranks = (
        first_ranks if second is None else [_ranks(values[chosen]) for values in second.values]
    )
    return Similarity(torch.stack(first_ranks) @ torch.stack(second_ranks).T, len(chosen))


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of the distances of all pairs, centred and of length 1; NaN where all are
    equal.
    """
    units = unit_vectors(values)
    rows, columns = torch.triu_indices(len(values), len(values), 1)
    cosines = (units @ units.T)[rows, columns].round(
        decimals=12
    )  # so that equal distances share a rank
    ranks = torch.from_numpy(np.asarray(stats.rankdata(-cosines.numpy())))
    centred = ranks - ranks.mean()
    ranked: Tensor = centred / centred.norm()
    return ranked


def _take(stream: CKAStream, first: Features, second: Features | None, images: Tensor) -> None:
    for batch in images.split(_AT_ONCE):
        other = None if second is None else [values[batch] for values in second.values]
        stream.add([values[batch] for values in first.values], other)


def _require_same(first: Features, second: Features | None) -> None:
    other = first if second is None else second
    for each in (first, other):
        if not isinstance(each, Features):
            name = type(each).__name__  # type: ignore[unreachable]  # an untyped call
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
