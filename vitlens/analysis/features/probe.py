"""Linear probe: logistic regression on features, with held-out images for its regularisation."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.features.neighbours import require_labelled
from vitlens.errors import DataError
from vitlens.shapes import Labels
from vitlens.summary import Summary
from vitlens.uncertainty import Estimate

# values of C, the inverse strength of regularisation
STRENGTHS: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
HELD_OUT: Final = 0.2  # share of the training images on which C is chosen
SMALL: Final = 5_000_000  # numbers in the training features, below which one thread is fastest
STEPS: Final = 1000  # the most of L-BFGS


@dataclass(frozen=True, repr=False)
class Probe(Summary):
    """The predictions of a linear classifier on frozen features for n test images.

    predictions, correct: (n,).
    accuracy: with its 95 % interval.
    c: the value chosen.
    tried: accuracy on the held-out images (fraction) by C.
    notes: remarks for a report.
    """

    predictions: Labels
    correct: Bool[Tensor, " batch"]
    accuracy: Estimate
    c: float
    tried: Mapping[float, float]
    notes: tuple[str, ...] = ()


def probe(
    train: Float[Tensor, "trained dim"],
    train_labels: Tensor,
    test: Float[Tensor, "tested _"],
    test_labels: Labels,
    *,
    train_groups: Tensor | None = None,
    groups: Tensor | None = None,
    seed: int = 0,
) -> Probe:
    """Classify test images by a linear classifier on frozen features, as `vitlens features` does.

    train, test: features of one layer, such as `vitlens.features(model, images).at(-1)`.
    train_labels, test_labels: class indices.
    train_groups: images that share one stay together.
    groups: the source of each test image, for the interval.

    The classifier is scikit-learn's logistic regression on features scaled to mean 0 and standard
    deviation 1. C is the value that is most accurate on a seeded fifth of the training images; of
    equal ones, it is the strongest regularisation. The final fit is on all of them. A class with a
    single training image has no part in choosing C, and a note says so. Raises DataError for fewer
    than two classes or too few images to hold any out, InputError for features and labels that do
    not fit.

    >>> import vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> train = vitlens.load_data("digits", part="train", limit=40)
    >>> test = vitlens.load_data("digits", part="test", limit=40)
    >>> bank, queries = (vitlens.features(vit, split).at(-1) for split in (train, test))
    >>> vitlens.probe(bank, train.labels, queries, test.labels, groups=test.groups).accuracy.n
    40
    """
    require_labelled(train, train_labels, test, test_labels)
    labels = train_labels.numpy()
    is_held_out = held_out_mask(train_labels, groups=train_groups, seed=seed).numpy()
    vectors = train.numpy()
    tried = dict[float, float]()
    has_converged = True
    trials = _fits(
        vectors[~is_held_out], labels[~is_held_out], vectors[is_held_out], sorted(STRENGTHS)
    )
    for fit in trials:
        tried[fit.c] = float((fit.predictions == labels[is_held_out]).mean())
        has_converged &= fit.has_converged
    best = max(tried, key=lambda c: (tried[c], -c))
    (final,) = _fits(vectors, labels, test.numpy(), [best])
    has_converged &= final.has_converged
    predictions = torch.from_numpy(final.predictions).long()
    correct = predictions == test_labels
    notes = _class_notes(labels, test_labels.numpy())
    if not has_converged:
        notes.append(f"a fit was cut short after {STEPS} steps")
    return Probe(predictions, correct, accuracy(correct, groups=groups), best, tried, tuple(notes))


def _class_notes(labels: NDArray[np.int64], test_labels: NDArray[np.int64]) -> list[str]:
    """Return remarks on classes with one training image, or none."""
    notes = list[str]()
    classes, counts = np.unique(labels, return_counts=True)
    single = classes[counts == 1]
    if len(single):
        examples = ", ".join(str(label) for label in single[:5])
        notes.append(
            f"{len(single)} classes have a single training image and no part in choosing C "
            f"({examples})"
        )
    untrained = np.setdiff1d(test_labels, classes)
    if len(untrained):
        notes.append(
            f"{len(untrained)} classes of the test images have no training image and cannot be "
            "right"
        )
    return notes


@dataclass(frozen=True)
class _Fit:
    """The predictions of test vectors by a classifier with this C."""

    c: float
    predictions: NDArray[np.int64]
    has_converged: bool


def _fits(
    train: NDArray[np.float32],
    labels: NDArray[np.int64],
    test: NDArray[np.float32],
    strengths: Sequence[float],
) -> Iterator[_Fit]:
    """Yield a fit for each C; each starts from the previous solution.

    Vectors are standardised by the training ones in float64; constant columns become 0.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression  # takes a second to import
    from threadpoolctl import threadpool_limits

    mean = train.mean(0, dtype=np.float64)
    spread = train.std(0, dtype=np.float64)
    varies = spread > 1e-12 * np.abs(mean).clip(1e-30)
    factor = np.divide(1, spread, out=np.zeros_like(spread), where=varies)
    scaled_train = ((train - mean) * factor).astype(np.float32)
    scaled_test = ((test - mean) * factor).astype(np.float32)
    model = LogisticRegression(max_iter=STEPS, warm_start=True)
    # each step is one small matrix product, which several threads make ten times slower
    threads = 1 if scaled_train.size < SMALL else None
    for c in strengths:
        with warnings.catch_warnings(), threadpool_limits(threads):
            warnings.simplefilter("ignore", ConvergenceWarning)  # reported in the notes
            model.set_params(C=c).fit(scaled_train, labels)
        yield _Fit(c, model.predict(scaled_test), bool(model.n_iter_.max() < STEPS))


def held_out_mask(
    labels: Tensor, *, groups: Tensor | None = None, seed: int = 0
) -> Bool[Tensor, " batch"]:
    """Return which training images are held out to choose C.

    They are a seeded share of each class, groups together, so that one of every class is left for
    the fit. Raises DataError where none can then be held out, or there is only one class.
    """
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected images of at least 2 classes to probe, found {len(labels.unique())}; give "
            "more data"
        )
    members = torch.arange(len(labels))
    if groups is not None:
        members = groups.unique(return_inverse=True)[1]
    order = torch.randperm(int(members.max()) + 1, generator=torch.Generator().manual_seed(seed))
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        in_class = labels == label
        shuffled = order[torch.isin(order, members[in_class])]  # the groups of this class
        count = min(max(1, round(HELD_OUT * len(shuffled))), len(shuffled) - 1)
        is_held_out |= in_class & torch.isin(members, shuffled[:count])
    if not is_held_out.any():
        raise DataError(
            "expected a class with at least 2 training images to choose C on, found none; give "
            "more data"
        )
    return is_held_out
