"""Linear probe: logistic regression on features, its regularisation chosen on a part held out of the training data."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.errors import DataError, InputError
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate

STRENGTHS: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # scikit-learn's C: small is strong regularisation
HELD_OUT: Final = 0.2  # of the training images, to choose C on
STEPS: Final = 1000  # of L-BFGS, at most

Numbers = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Probe:
    """The predictions of a linear classifier on frozen features for n test images.

    predictions, correct: (n,); accuracy: with its 95 % interval; c: the regularisation chosen; tried: accuracy on the
    validation part (fraction) by C; trained, validation: images it was fitted on in the end (all of the training
    part), and those of them that C was chosen on; notes: what else a report must say.
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
    """How well a linear classifier can read the labels off features that it cannot change.

    scikit-learn's logistic regression on features scaled to mean 0 and deviation 1; C is the one of the strengths that
    is most accurate on a seeded fifth of the training images (of equals the strongest regularisation), then all of them
    are fitted. train_groups: images that share one stay on one side; groups: of the test images, for the interval. A
    class with a single training image cannot be validated and is reported in the notes. Raises DataError for fewer than
    two classes or too few images to hold any out, InputError for labels that do not fit.
    """
    for name, vectors, given in (("training", train, train_labels), ("test", test, test_labels)):
        if given.shape != (len(vectors),):
            raise InputError(f"expected {len(vectors)} {name} labels, found {tuple(given.shape)}")
    if train.shape[1] != test.shape[1]:
        raise InputError(f"expected test features of width {train.shape[1]}, found {test.shape[1]}")
    labels, held = train_labels.numpy(), held_out(train_labels, groups=train_groups, seed=seed).numpy()
    kept = ~held
    tried, slow = _validated(train.numpy(), labels, kept, strengths)
    best = max(tried, key=lambda c: (tried[c], -c))
    scaled, shown = _scaled(train.numpy(), test.numpy())
    fitted = _Fit(scaled, labels)
    fitted.at(best)
    predictions = torch.from_numpy(fitted.predict(shown)).long()
    correct = predictions == test_labels
    notes = _notes(labels, test_labels.numpy(), slow=slow or not fitted.converged)
    found = accuracy(correct, groups=groups, seed=seed)
    return Probe(predictions, correct, found, best, tried, len(labels), int(held.sum()), notes)


def held_out(
    labels: Tensor, *, groups: Tensor | None = None, share: float = HELD_OUT, seed: int = 0
) -> Bool[Tensor, " batch"]:
    """Which training images are held out to choose C on: a seeded share of each class, whole groups together.

    Every class keeps at least one image (or group) to be fitted on. Raises DataError where that leaves none to hold
    out, or there is only one class.
    """
    if len(labels.unique()) < 2:
        raise DataError(f"expected images of at least 2 classes to probe, found {len(labels.unique())}; give more data")
    members = torch.arange(len(labels)) if groups is None else groups.unique(return_inverse=True)[1]
    order = torch.randperm(int(members.max()) + 1, generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        mine = labels == label
        own = order[torch.isin(order, members[mine])]  # this class's groups, shuffled
        count = min(max(1, round(share * len(own))), len(own) - 1)
        held |= mine & torch.isin(members, own[:count])
    if not held.any():
        raise DataError("expected a class with at least 2 training images to choose C on, found none; give more data")
    return held


class _Fit:
    """One logistic regression whose C is changed; each fit begins where the last one ended."""

    def __init__(self, vectors: Numbers, labels: Integers) -> None:
        from sklearn.linear_model import LogisticRegression  # takes a second to import

        self._vectors, self._labels = vectors, labels
        self._model = LogisticRegression(max_iter=STEPS, warm_start=True)
        self.converged = True

    def at(self, c: float) -> None:
        """Fit with this C."""
        from sklearn.exceptions import ConvergenceWarning

        self._model.set_params(C=c)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # reported in the notes
            self._model.fit(self._vectors, self._labels)
        self.converged = bool(self._model.n_iter_.max() < STEPS)

    def predict(self, vectors: Numbers) -> Integers:
        """The likeliest labels."""
        found: Integers = self._model.predict(vectors)
        return found


def _validated(
    vectors: Numbers, labels: Integers, kept: NDArray[np.bool_], strengths: Sequence[float]
) -> tuple[dict[float, float], bool]:
    """Accuracy on the images held out by C, and whether any fit was cut short."""
    train, shown = _scaled(vectors[kept], vectors[~kept])
    fit, tried, slow = _Fit(train, labels[kept]), dict[float, float](), False
    for c in sorted(strengths):
        fit.at(c)
        tried[c] = float((fit.predict(shown) == labels[~kept]).mean())
        slow |= not fit.converged
    return tried, slow


def _scaled(train: Numbers, shown: Numbers) -> tuple[Numbers, Numbers]:
    """Both by the mean and deviation of the first, in float64 while they are made; constant columns become 0."""
    mean, spread = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    factor = np.divide(1, spread, out=np.zeros_like(spread), where=spread > 1e-12 * np.abs(mean).clip(1e-30))
    first, second = ((part - mean) * factor for part in (train, shown))
    return first.astype(np.float32), second.astype(np.float32)


def _notes(labels: Integers, shown: Integers, *, slow: bool) -> tuple[str, ...]:
    names, counts = np.unique(labels, return_counts=True)
    notes = []
    if (counts == 1).any():
        alone = ", ".join(str(name) for name in names[counts == 1][:5])
        notes.append(f"{(counts == 1).sum()} classes have a single training image and no part in choosing C ({alone})")
    unknown = np.setdiff1d(shown, names)
    if len(unknown):
        notes.append(f"{len(unknown)} classes of the test images have no training image and cannot be right")
    if slow:
        notes.append(f"a fit was cut short after {STEPS} steps")
    return tuple(notes)
