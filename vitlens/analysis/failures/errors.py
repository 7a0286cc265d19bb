"""Where two models fail on the same images: both, one alone, and whether they are wrong in the same way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import Evaluation, accuracy
from vitlens.errors import InputError
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate, bootstrap_difference, mcnemar

CELLS: Final = ("both right", "only first wrong", "only second wrong", "both wrong, alike", "both wrong, differently")
BOTH_RIGHT, FIRST_WRONG, SECOND_WRONG, WRONG_ALIKE, WRONG_DIFFERENTLY = range(len(CELLS))

PerImage = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Answers:
    """One model's answers to n labelled images, in classes that two models share.

    prediction: (n,) indices into the shared names; confidence: probability of the prediction; margin: that minus the
    second likeliest class's; correct: (n,).
    """

    alias: str
    prediction: Labels
    confidence: PerImage
    margin: PerImage
    correct: Bool[Tensor, " batch"]


@dataclass(frozen=True)
class Comparison:
    """Two models on the same n labelled images.

    classes: names that either model knows, the data's first; labels: (n,); first, second: their answers; cells: (n,)
    indices into CELLS; groups: (n,) what images share, or None.
    """

    classes: tuple[str, ...]
    labels: Labels
    first: Answers
    second: Answers
    cells: Int[Tensor, " batch"]
    groups: Tensor | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Images in each cell, every cell named; they add up to all images."""
        found = torch.bincount(self.cells, minlength=len(CELLS)).tolist()
        return dict(zip(CELLS, found))

    @property
    def p(self) -> float:
        """McNemar's exact two-sided p-value that both are right equally often."""
        counts = self.counts
        return mcnemar(counts[CELLS[SECOND_WRONG]], counts[CELLS[FIRST_WRONG]])

    def accuracies(self, *, seed: int = 0) -> tuple[Estimate, Estimate]:
        """How often each is right, with its interval."""
        first, second = (accuracy(one.correct, groups=self.groups, seed=seed) for one in (self.first, self.second))
        return first, second

    def difference(self, *, seed: int = 0) -> Estimate:
        """Accuracy of the first minus that of the second in points, with its paired interval."""
        one, two = (100.0 * model.correct.double().numpy() for model in (self.first, self.second))
        groups = None if self.groups is None else self.groups.numpy()
        return bootstrap_difference(one, two, groups=groups, seed=seed, unit="points")


def compare_answers(first: Evaluation, second: Evaluation) -> Comparison:
    """Two evaluations of the same labelled images set side by side; classes are matched by name.

    Raises InputError where the labels differ, by number or by name.
    """
    truths = [[evaluation.classes[label] for label in evaluation.labels.tolist()] for evaluation in (first, second)]
    if truths[0] != truths[1]:
        raise InputError(f"expected both models on the same images, found {len(truths[0])} and {len(truths[1])} labels")
    classes = tuple(dict.fromkeys((*first.classes, *second.classes)))
    one, two = _answers(first, classes), _answers(second, classes)
    cells = taxonomy(first.labels, one.prediction, two.prediction)
    return Comparison(classes, first.labels, one, two, cells, first.groups)


def taxonomy(labels: Labels, first: Labels, second: Labels) -> Int[Tensor, " batch"]:
    """The cell of each image, an index into CELLS, from the truth and the two predictions."""
    right, also = first == labels, second == labels
    cells = torch.full_like(labels, BOTH_RIGHT)
    cells[~right & also] = FIRST_WRONG
    cells[right & ~also] = SECOND_WRONG
    cells[~right & ~also] = WRONG_DIFFERENTLY
    cells[~right & ~also & (first == second)] = WRONG_ALIKE
    return cells


@dataclass(frozen=True)
class Confusion:
    """A truth that models take for another class: how many images each does that with."""

    truth: str
    prediction: str
    first: int
    second: int


def confusions(comparison: Comparison) -> tuple[Confusion, ...]:
    """Every pair of truth and wrong prediction of either model, the most frequent (both together) first."""
    names, truths = comparison.classes, comparison.labels.tolist()
    counted = [
        Counter(pair for pair in zip(truths, model.prediction.tolist()) if pair[0] != pair[1])
        for model in (comparison.first, comparison.second)
    ]
    both = counted[0] + counted[1]
    ordered = sorted(both, key=lambda pair: (-both[pair], pair))
    return tuple(
        Confusion(names[truth], names[other], counted[0][truth, other], counted[1][truth, other])
        for truth, other in ordered
    )


@dataclass(frozen=True)
class Slice:
    """Some of the images, by class or by a number: how many fall into each cell, and how often each model is right.

    name: "cat", or the bin's number from 1 with its bounds in low and high.
    """

    name: str
    low: float | None
    high: float | None
    n: int
    counts: dict[str, int]
    first: Estimate
    second: Estimate


def by_class(comparison: Comparison, *, seed: int = 0) -> tuple[Slice, ...]:
    """One slice for each class that is the truth of some image, in the order of the classes."""
    present = comparison.labels.unique().tolist()
    return tuple(
        _slice(comparison, comparison.labels == label, comparison.classes[label], seed=seed) for label in present
    )


def by_number(comparison: Comparison, values: PerImage, *, bins: int = 4, seed: int = 0) -> tuple[Slice, ...]:
    """Slices of about equally many images by rising value (quartiles); equal values are never put apart.

    values: (n,); images whose value is NaN (not known) are in no slice. Fewer than bins slices come out where many
    values are equal.
    """
    known = values.isfinite()
    if not known.any():
        return ()
    edges = torch.quantile(values[known].double(), torch.linspace(0, 1, bins + 1, dtype=torch.float64))[1:-1].unique()
    member = torch.where(known, torch.bucketize(values.double(), edges), -1)
    slices: list[Slice] = []
    for index in range(len(edges) + 1):
        inside = member == index
        if inside.any():
            bounds = float(values[inside].min()), float(values[inside].max())
            slices.append(_slice(comparison, inside, str(len(slices) + 1), *bounds, seed=seed))
    return tuple(slices)


def _slice(
    comparison: Comparison,
    inside: Tensor,
    name: str,
    low: float | None = None,
    high: float | None = None,
    *,
    seed: int,
) -> Slice:
    groups = None if comparison.groups is None else comparison.groups[inside]
    first, second = (
        accuracy(model.correct[inside], groups=groups, seed=seed) for model in (comparison.first, comparison.second)
    )
    counted = torch.bincount(comparison.cells[inside], minlength=len(CELLS)).tolist()
    return Slice(name, low, high, int(inside.sum()), dict(zip(CELLS, counted)), first, second)


def _answers(evaluation: Evaluation, classes: Sequence[str]) -> Answers:
    place = {name: index for index, name in enumerate(classes)}
    shared = torch.tensor([place[name] for name in evaluation.classes])
    likely = evaluation.probabilities.topk(min(2, len(evaluation.classes)), dim=-1).values
    second = likely[:, 1] if likely.shape[1] > 1 else torch.zeros_like(likely[:, 0])
    return Answers(
        evaluation.alias,
        shared[evaluation.predictions],
        likely[:, 0],
        likely[:, 0] - second,
        evaluation.correct,
    )
