"""Linear probe: logistic regression on features, its regularisation chosen on held-out training images."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.errors import DataError, InputError
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate

STRENGTHS: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # values of C, the inverse strength of regularisation
HELD_OUT: Final = 0.2  # share of the training images on which C is chosen
SMALL: Final = 5_000_000  # numbers in the training features, below which one thread is fastest
STEPS: Final = 1000  # the most of L-BFGS

Numbers = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Probe:
    """The predictions of a linear classifier on frozen features for n test images.

    predictions, correct: (n,); accuracy: with its 95 % interval; c: the value chosen; tried: accuracy on the held-out
    images (fraction) by C; trained: the number of training images of the final fit (all of them); validation: how many
    of them C was chosen on; notes: remarks for a report.
    """

    predictions: Labels
    correct: Bool[Tensor, " batch"]
    accuracy: Estimate
    c: float
    tried: Mapping[float, float]
    trained: int
    validation: int
    notes: tuple[str, ...] = ()


def probe(
    train: Float[Tensor, "trained dim"],
    train_labels: Tensor,
    test: Float[Tensor, "tested _"],
    test_labels: Labels,
    *,
    train_groups: Tensor | None = None,
    groups: Tensor | None = None,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
) -> Probe:
    """The accuracy of a linear classifier on frozen features.

    scikit-learn's logistic regression on features scaled to mean 0 and standard deviation 1; C is the value that is
    most accurate on a seeded fifth of the training images (of equal ones the strongest regularisation), and the final
    fit is on all of them. train_groups: images that share one stay together; groups: of the test images, for the
    interval. A class with a single training image has no part in choosing C, which the notes say. Raises DataError for
    fewer than two classes or too few images to hold any out, InputError for labels that do not fit.
    """
    for name, vectors, own_labels in (("training", train, train_labels), ("test", test, test_labels)):
        if own_labels.shape != (len(vectors),):
            raise InputError(f"expected {len(vectors)} {name} labels, found {tuple(own_labels.shape)}")
    if train.shape[1] != test.shape[1]:
        raise InputError(f"expected test features of width {train.shape[1]}, found {test.shape[1]}")
    labels, held = train_labels.numpy(), held_out(train_labels, groups=train_groups, seed=seed).numpy()
    fitting = ~held
    tried, cut_short = _validated(train.numpy(), labels, fitting, strengths)
    best = max(tried, key=lambda c: (tried[c], -c))
    scaled, test_scaled = _scaled(train.numpy(), test.numpy())
    fitted = _Fit(scaled, labels)
    fitted.at(best)
    predictions = torch.from_numpy(fitted.predict(test_scaled)).long()
    correct = predictions == test_labels
    notes = _notes(labels, test_labels.numpy(), cut_short=cut_short or not fitted.converged)
    estimate = accuracy(correct, groups=groups, seed=seed)
    return Probe(predictions, correct, estimate, best, tried, len(labels), int(held.sum()), notes)


def held_out(
    labels: Tensor, *, groups: Tensor | None = None, share: float = HELD_OUT, seed: int = 0
) -> Bool[Tensor, " batch"]:
    """Which training images are held out to choose C: a seeded share of each class, whole groups together.

    At least one image (or group) of every class is left for the fit. Raises DataError where none can then be held out,
    or there is only one class.
    """
    if len(labels.unique()) < 2:
        raise DataError(f"expected images of at least 2 classes to probe, found {len(labels.unique())}; give more data")
    members = torch.arange(len(labels)) if groups is None else groups.unique(return_inverse=True)[1]
    order = torch.randperm(int(members.max()) + 1, generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        in_class = labels == label
        own = order[torch.isin(order, members[in_class])]  # this class's groups, shuffled
        count = min(max(1, round(share * len(own))), len(own) - 1)
        held |= in_class & torch.isin(members, own[:count])
    if not held.any():
        raise DataError("expected a class with at least 2 training images to choose C on, found none; give more data")
    return held


class _Fit:
    """One logistic regression fitted for several values of C; each fit starts from the previous solution."""

    def __init__(self, vectors: Numbers, labels: Integers) -> None:
        from sklearn.linear_model import LogisticRegression  # takes a second to import

        self._vectors, self._labels = vectors, labels
        self._model = LogisticRegression(max_iter=STEPS, warm_start=True)
        self.converged = True

    def at(self, c: float) -> None:
        """Fit with this C."""
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits

        self._model.set_params(C=c)
        # each step is one small matrix product, which several threads make ten times slower
        threads = 1 if self._vectors.size < SMALL else None
        with warnings.catch_warnings(), threadpool_limits(threads):
            warnings.simplefilter("ignore", ConvergenceWarning)  # reported in the notes
            self._model.fit(self._vectors, self._labels)
        self.converged = bool(self._model.n_iter_.max() < STEPS)

    def predict(self, vectors: Numbers) -> Integers:
        """The predicted labels."""
        labels: Integers = self._model.predict(vectors)
        return labels


def _validated(
    vectors: Numbers, labels: Integers, fitting: NDArray[np.bool_], strengths: Sequence[float]
) -> tuple[dict[float, float], bool]:
    """Accuracy on the held-out images by C, and whether any fit was cut short."""
    train, held_vectors = _scaled(vectors[fitting], vectors[~fitting])
    fit, tried, cut_short = _Fit(train, labels[fitting]), dict[float, float](), False
    for c in sorted(strengths):
        fit.at(c)
        tried[c] = float((fit.predict(held_vectors) == labels[~fitting]).mean())
        cut_short |= not fit.converged
    return tried, cut_short


def _scaled(train: Numbers, test: Numbers) -> tuple[Numbers, Numbers]:
    """Both standardised by the mean and deviation of the first, computed in float64; constant columns become 0."""
    mean, spread = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    factor = np.divide(1, spread, out=np.zeros_like(spread), where=spread > 1e-12 * np.abs(mean).clip(1e-30))
    first, second = ((part - mean) * factor for part in (train, test))
    return first.astype(np.float32), second.astype(np.float32)


def _notes(labels: Integers, test_labels: Integers, *, cut_short: bool) -> tuple[str, ...]:
    names, counts = np.unique(labels, return_counts=True)
    notes = []
    if (counts == 1).any():
        alone = ", ".join(str(name) for name in names[counts == 1][:5])
        notes.append(f"{(counts == 1).sum()} classes have a single training image and no part in choosing C ({alone})")
    unknown = np.setdiff1d(test_labels, names)
    if len(unknown):
        notes.append(f"{len(unknown)} classes of the test images have no training image and cannot be right")
    if cut_short:
        notes.append(f"a fit was cut short after {STEPS} steps")
    return tuple(notes)
