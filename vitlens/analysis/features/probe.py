"""Linear probe: logistic regression on features, its regularisation chosen on held-out training
images.
"""

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

STRENGTHS: Final = (
    1e-4,
    1e-3,
    1e-2,
    1e-1,
    1.0,
    10.0,
)  # values of C, the inverse strength of regularisation
HELD_OUT: Final = 0.2  # share of the training images on which C is chosen
SMALL: Final = 5_000_000  # numbers in the training features, below which one thread is fastest
STEPS: Final = 1000  # the most of L-BFGS


@dataclass(frozen=True, repr=False)
class Probe(Summary):
    """The predictions of a linear classifier on frozen features for n test images.

    predictions, correct: (n,); accuracy: with its 95 % interval; c: the value chosen; tried:
    accuracy on the held-out images (fraction) by C; notes: remarks for a report.
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

    train, test: features of one layer, such as `vitlens.features(model, images).at(-1)`;
    train_labels, test_labels: class indices. The classifier is scikit-learn's logistic regression
    on features scaled to mean 0 and standard deviation 1. C is the value that is most accurate on a
    seeded fifth of the training images (of equal ones the strongest regularisation), and the final
    fit is on all of them. train_groups: images that share one stay together; groups: of the test
    images, for the interval. A class with a single training image has no part in choosing C, which
    the notes say. Raises DataError for fewer than two classes or too few images to hold any out,
    InputError for features and labels that do not fit.

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
    held = held_out(train_labels, groups=train_groups, seed=seed).numpy()
    vectors = train.numpy()
    tried = dict[float, float]()
    converged = True
    for c, found, done in _fits(vectors[~held], labels[~held], vectors[held], sorted(STRENGTHS)):
        tried[c] = float((found == labels[held]).mean())
        converged &= done
    best = max(tried, key=lambda c: (tried[c], -c))
    ((_, found, done),) = _fits(vectors, labels, test.numpy(), [best])
    predictions = torch.from_numpy(found).long()
    correct = predictions == test_labels
    names, counts = np.unique(labels, return_counts=True)
    notes = []
    unknown = np.setdiff1d(test_labels.numpy(), names)
    if (counts == 1).any():
        alone = ", ".join(str(name) for name in names[counts == 1][:5])
        notes.append(
            f"{(counts == 1).sum()} classes have a single training image and no part in choosing C "
            f"({alone})"
        )
    if len(unknown):
        notes.append(
            f"{len(unknown)} classes of the test images have no training image and cannot be right"
        )
    if not (converged and done):
        notes.append(f"a fit was cut short after {STEPS} steps")
    return Probe(predictions, correct, accuracy(correct, groups=groups), best, tried, tuple(notes))


def _fits(
    train: NDArray[np.float32],
    labels: NDArray[np.int64],
    test: NDArray[np.float32],
    strengths: Sequence[float],
) -> Iterator[tuple[float, NDArray[np.int64], bool]]:
    """For each C the labels predicted of the test vectors, and whether the fit converged; each fit
    starts from the previous solution. Vectors are standardised by the training ones in float64;
    constant columns become 0.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression  # takes a second to import
    from threadpoolctl import threadpool_limits

    mean = train.mean(0, dtype=np.float64)
    spread = train.std(0, dtype=np.float64)
    factor = np.divide(
        1, spread, out=np.zeros_like(spread), where=spread > 1e-12 * np.abs(mean).clip(1e-30)
    )
    scaled, test_scaled = (((part - mean) * factor).astype(np.float32) for part in (train, test))
    model = LogisticRegression(max_iter=STEPS, warm_start=True)
    for c in strengths:
        # each step is one small matrix product, which several threads make ten times slower
        with warnings.catch_warnings(), threadpool_limits(1 if scaled.size < SMALL else None):
            warnings.simplefilter("ignore", ConvergenceWarning)  # reported in the notes
            model.set_params(C=c).fit(scaled, labels)
        yield c, model.predict(test_scaled), bool(model.n_iter_.max() < STEPS)


def held_out(
    labels: Tensor, *, groups: Tensor | None = None, seed: int = 0
) -> Bool[Tensor, " batch"]:
    """Return which training images are held out to choose C: a seeded share of each class, whole
    groups together, so that one of every class is left for the fit.

    Raises DataError where none can then be, or there is only one class.
    """
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected images of at least 2 classes to probe, found {len(labels.unique())}; give "
            "more data"
        )
    members = torch.arange(len(labels)) if groups is None else groups.unique(return_inverse=True)[1]
    order = torch.randperm(int(members.max()) + 1, generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        in_class = labels == label
        own = order[torch.isin(order, members[in_class])]  # this class's groups, shuffled
        count = min(max(1, round(HELD_OUT * len(own))), len(own) - 1)
        held |= in_class & torch.isin(members, own[:count])
    if not held.any():
        raise DataError(
            "expected a class with at least 2 training images to choose C on, found none; give "
            "more data"
        )
    return held
