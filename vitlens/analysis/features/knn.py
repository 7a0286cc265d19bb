"""k-nearest-neighbour classification, its accuracy, and the precision of retrieval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.features.defaults import VOTERS
from vitlens.analysis.features.neighbours import Bank, Neighbours, Queries, nearest
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import WEIGHTINGS, Weighting
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate

TEMPERATURE: Final = 0.07  # DINO's (Caron 2021, appendix F): weight = exp(similarity / temperature)


@dataclass(frozen=True)
class Votes:
    """The predictions of k neighbours for n images.

    predictions: (n,); correct: (n,); accuracy: its 95 % interval is Wilson's, or over groups where images share one.
    """

    k: int
    weighting: Weighting
    predictions: Labels
    correct: Bool[Tensor, " batch"]
    accuracy: Estimate


def knn(
    bank: Bank,
    bank_labels: Tensor,
    queries: Queries,
    labels: Labels,
    *,
    classes: int,
    ks: Sequence[int] = VOTERS,
    weighting: Weighting = "dino",
    groups: Tensor | None = None,
    leave_out: Tensor | None = None,
    seed: int = 0,
) -> tuple[Votes, ...]:
    """Classification of queries by their k nearest neighbours in a labelled bank, for each k, from one search.

    classes: their number; groups: which queries share a source, for the interval; leave_out: as in `nearest`, for
    queries that are in the bank. Raises InputError for a k above the bank's size and for labels that do not fit.
    """
    _require_labels(bank_labels, len(bank), classes)
    _require_labels(labels, len(queries), classes)
    neighbours = nearest(queries, bank, k=max(ks), leave_out=leave_out)
    results = []
    for k in ks:
        predictions = vote(neighbours, bank_labels, k=k, classes=classes, weighting=weighting)
        correct = predictions == labels
        results.append(Votes(k, weighting, predictions, correct, accuracy(correct, groups=groups, seed=seed)))
    return tuple(results)


def vote(neighbours: Neighbours, labels: Tensor, *, k: int, classes: int, weighting: Weighting = "dino") -> Labels:
    """The class with most votes among the k nearest; labels: (bank,).

    weighting: "majority" counts each neighbour once, "dino" by exp(similarity / 0.07). Of equal classes the lowest
    wins, as in scikit-learn. Raises InputError for a k above the number of neighbours.
    """
    if weighting not in WEIGHTINGS:
        raise UnknownNameError("weighting of neighbours", weighting, WEIGHTINGS)
    if not 1 <= k <= neighbours.indices.shape[1]:
        raise InputError(f"expected k from 1 to {neighbours.indices.shape[1]}, the number of neighbours, found {k}")
    named = labels[neighbours.indices[:, :k]]  # (queries, k)
    similar = neighbours.similarity[:, :k]
    weights = torch.ones_like(similar) if weighting == "majority" else (similar / TEMPERATURE).exp()
    sums = torch.zeros(len(named), classes, dtype=torch.float64).scatter_add_(1, named, weights)
    return torch.from_numpy(sums.numpy().argmax(1))  # unlike torch's, the first of equal values


def same_class(neighbours: Neighbours, bank_labels: Tensor, labels: Labels, *, k: int) -> Float[Tensor, " batch"]:
    """Precision at k of a retrieval: the fraction of each query's k nearest neighbours that are of its class."""
    return (bank_labels[neighbours.indices[:, :k]] == labels[:, None]).double().mean(1)


def _require_labels(labels: Tensor, images: int, classes: int) -> None:
    if labels.shape != (images,):
        raise InputError(f"expected labels of shape ({images},), found {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(f"expected labels from 0 to {classes - 1}, found {int(labels.min())} to {int(labels.max())}")
