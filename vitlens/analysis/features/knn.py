"""k-nearest-neighbour classification: what an image's neighbours say it is, and how often they are right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.features.neighbours import Bank, Neighbours, Queries, nearest
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import WEIGHTINGS, Weighting
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate

TEMPERATURE: Final = 0.07  # DINO's (Caron 2021, appendix F): weight = exp(similarity / temperature)
NEIGHBOURS: Final = (1, 5, 20)


@dataclass(frozen=True)
class Votes:
    """What k neighbours say of n images.

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
    ks: Sequence[int] = NEIGHBOURS,
    weighting: Weighting = "dino",
    groups: Tensor | None = None,
    leave_out: Tensor | None = None,
    seed: int = 0,
) -> tuple[Votes, ...]:
    """How often the k nearest of a labelled bank name a query's class, for each k; one search serves all.

    classes: how many; groups: what the queries share, for the interval; leave_out: as in `nearest`, for queries that
    are in the bank. Raises InputError for a k above the bank's size and for labels that do not fit.
    """
    _require_labels(bank_labels, len(bank), classes)
    _require_labels(labels, len(queries), classes)
    found = nearest(queries, bank, k=max(ks), leave_out=leave_out)
    results = []
    for k in ks:
        predictions = vote(found, bank_labels, k=k, classes=classes, weighting=weighting)
        correct = predictions == labels
        results.append(Votes(k, weighting, predictions, correct, accuracy(correct, groups=groups, seed=seed)))
    return tuple(results)


def vote(neighbours: Neighbours, labels: Tensor, *, k: int, classes: int, weighting: Weighting = "dino") -> Labels:
    """The class that the k nearest name; labels: (bank,).

    weighting: "majority" counts each neighbour once, "dino" by exp(similarity / 0.07). Of equal classes the lowest
    wins, as in scikit-learn. Raises InputError for a k that was not looked for.
    """
    if weighting not in WEIGHTINGS:
        raise UnknownNameError("weighting of neighbours", weighting, WEIGHTINGS)
    if not 1 <= k <= neighbours.indices.shape[1]:
        raise InputError(f"expected k from 1 to {neighbours.indices.shape[1]}, the neighbours looked for, found {k}")
    named = labels[neighbours.indices[:, :k]]  # (queries, k)
    similar = neighbours.similarity[:, :k]
    weights = torch.ones_like(similar) if weighting == "majority" else (similar / TEMPERATURE).exp()
    sums = torch.zeros(len(named), classes, dtype=torch.float64).scatter_add_(1, named, weights)
    return torch.from_numpy(sums.numpy().argmax(1))  # numpy's is the first of equal ones


def same_class(neighbours: Neighbours, bank_labels: Tensor, labels: Labels, *, k: int) -> Float[Tensor, " batch"]:
    """The share of each query's k nearest that are of its own class: precision at k of a retrieval."""
    return (bank_labels[neighbours.indices[:, :k]] == labels[:, None]).double().mean(1)


def _require_labels(labels: Tensor, images: int, classes: int) -> None:
    if labels.shape != (images,):
        raise InputError(f"expected labels of shape ({images},), found {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(f"expected labels from 0 to {classes - 1}, found {int(labels.min())} to {int(labels.max())}")
