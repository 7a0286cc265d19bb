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

# the values of C that are compared; C is the inverse strength of regularisation
STRENGTHS: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
HELD_OUT: Final = 0.2  # share of the training images on which C is chosen
SMALL: Final = 5_000_000  # training features with fewer numbers are fitted fastest by one thread
STEPS: Final = 1000  # L-BFGS is cut short after so many steps


@dataclass(frozen=True, repr=False)
class Probe(Summary):
    """The predictions of a linear classifier on frozen features for n test images.

    predictions (n,): the predicted class of each image.
    correct (n,): True if the prediction is the label.
    accuracy: the accuracy with its 95 % interval.
    c: the value of C of the final fit.
    tried: for each value of C, the accuracy on the held-out images, as a fraction.
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
    train_labels, test_labels: the class index of each image.
    train_groups: the source of each training image; images of one source are held out together.
    groups: the source of each test image, for the interval.
    seed: the seed of the choice of held-out images.

    The classifier is scikit-learn's logistic regression on features scaled to mean 0 and standard
    deviation 1. A fifth of the training images is held out to choose C, the inverse strength of
    regularisation. The most accurate C is used, or of equally accurate ones the smallest. The final
    fit is on all training images. A class with a single training image has no part in choosing C,
    and a note says so.

    Raises DataError for fewer than two classes or too few images to hold any out. Raises InputError
    for features and labels that do not fit.

    >>> import vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> train = vitlens.load_data("digits", part="train", limit=40)
    >>> test = vitlens.load_data("digits", part="test", limit=40)
    >>> bank = vitlens.features(vit, train).at(-1)
    >>> queries = vitlens.features(vit, test).at(-1)
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
        vectors[~is_held_out],
        labels[~is_held_out],
        test=vectors[is_held_out],
        strengths=sorted(STRENGTHS),
    )
    for fit in trials:
        tried[fit.c] = float((fit.predictions == labels[is_held_out]).mean())
        has_converged &= fit.has_converged
    best = max(tried, key=lambda c: (tried[c], -c))  # of equally accurate ones the smallest
    (final,) = _fits(vectors, labels, test=test.numpy(), strengths=[best])
    has_converged &= final.has_converged
    predictions = torch.from_numpy(final.predictions).long()
    correct = predictions == test_labels
    notes = _class_notes(labels, test_labels.numpy())
    if not has_converged:
        notes.append(f"a fit was cut short after {STEPS} steps")
    return Probe(
        predictions=predictions,
        correct=correct,
        accuracy=accuracy(correct, groups=groups),
        c=best,
        tried=tried,
        notes=tuple(notes),
    )


def _class_notes(labels: NDArray[np.int64], test_labels: NDArray[np.int64]) -> list[str]:
    """Return remarks on classes that have only one training image, or no training image."""
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
    """A fit of the classifier with one value of C.

    c: the value of C.
    predictions: the predicted class of each test vector.
    has_converged: False if the fit was cut short.
    """

    c: float
    predictions: NDArray[np.int64]
    has_converged: bool


def _fits(
    train: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    test: NDArray[np.float32],
    strengths: Sequence[float],
) -> Iterator[_Fit]:
    """Yield a fit for each value of C; each starts from the solution of the previous one.

    All vectors are scaled by the mean and standard deviation of the training vectors, in float64.
    Columns that do not vary become 0.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression  # takes a second to import
    from threadpoolctl import threadpool_limits

    mean = train.mean(0, dtype=np.float64)
    spread = train.std(0, dtype=np.float64)
    # A constant column has a spread of rounding errors, in proportion to its mean. The clip keeps
    # the limit above 0 for columns of zeros.
    varies = spread > 1e-12 * np.abs(mean).clip(1e-30)
    factor = np.divide(1, spread, out=np.zeros_like(spread), where=varies)
    scaled_train = ((train - mean) * factor).astype(np.float32)
    scaled_test = ((test - mean) * factor).astype(np.float32)
    model = LogisticRegression(max_iter=STEPS, warm_start=True)
    # each step is one small matrix product, which several threads make ten times slower
    threads = 1 if scaled_train.size < SMALL else None
    for c in strengths:
        with warnings.catch_warnings(), threadpool_limits(threads):
            warnings.simplefilter("ignore", ConvergenceWarning)  # a note of the probe reports it
            model.set_params(C=c).fit(scaled_train, labels)
        yield _Fit(c, model.predict(scaled_test), bool(model.n_iter_.max() < STEPS))


def held_out_mask(
    labels: Tensor, *, groups: Tensor | None = None, seed: int = 0
) -> Bool[Tensor, " batch"]:
    """Return True for the training images that are held out to choose C.

    They are a random share of the images of each class. At least one image of every class is left
    for the fit. Images of one group are held out together, whatever their classes.

    Raises DataError if no image can be held out, or if there is only one class.
    """
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected images of at least 2 classes to probe, found {len(labels.unique())}; give "
            "more data"
        )
    group_of_image = torch.arange(len(labels))  # numbers from 0
    if groups is not None:
        _, group_of_image = groups.unique(return_inverse=True)
    count = int(group_of_image.max()) + 1
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    _, class_of_image = labels.unique(return_inverse=True)
    groups_by_class = [
        shuffled[torch.isin(shuffled, group_of_image[class_of_image == number])].tolist()
        for number in range(int(class_of_image.max()) + 1)
    ]
    is_group_held_out = _held_out_groups(groups_by_class, count)
    is_held_out = is_group_held_out[group_of_image]
    if not is_held_out.any():
        raise DataError(
            "expected a class with at least 2 training images to choose C on, found none; give "
            "more data"
        )
    return is_held_out


def _held_out_groups(
    groups_by_class: Sequence[Sequence[int]], count: int
) -> Bool[Tensor, " groups"]:
    """Return True for the groups that are held out: the first of each class, up to its share.

    groups_by_class: the groups with images of each class, in random order. A group may have images
        of several classes. It stays in the fit if it is the last of one of them there.
    count: the number of groups.
    """
    classes_by_group: list[list[int]] = [[] for _ in range(count)]
    for label, members in enumerate(groups_by_class):
        for group in members:
            classes_by_group[group].append(label)
    left = [len(members) for members in groups_by_class]  # for the fit, by class
    is_held_out = torch.zeros(count, dtype=torch.bool)
    for label, members in enumerate(groups_by_class):
        least_left = len(members) - max(1, round(HELD_OUT * len(members)))
        for group in members:
            if left[label] <= least_left:
                break
            classes = classes_by_group[group]
            if is_held_out[group] or any(left[other] == 1 for other in classes):
                continue
            is_held_out[group] = True
            for other in classes:
                left[other] -= 1
    return is_held_out
