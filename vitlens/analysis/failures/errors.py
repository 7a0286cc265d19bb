"""The errors of two models on the same images: of both, of one only, and whether both predict the same class."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import Evaluation, accuracy
from vitlens.errors import InputError
from vitlens.shapes import Labels
from vitlens.summary import Line, Summary
from vitlens.uncertainty import Estimate, accuracy_difference, mcnemar

CELLS: Final = ("both right", "only first wrong", "only second wrong", "both wrong, alike", "both wrong, differently")
BOTH_RIGHT, FIRST_WRONG, SECOND_WRONG, WRONG_ALIKE, WRONG_DIFFERENTLY = range(len(CELLS))

PerImage = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Answers:
    """One model's predictions for n labelled images, in classes that two models share.

    prediction: (n,) indices into the shared names; confidence: probability of the prediction; margin: that minus the
    probability of the second class; correct: (n,).
    """

    alias: str
    prediction: Labels
    confidence: PerImage
    margin: PerImage
    correct: Bool[Tensor, " batch"]


@dataclass(frozen=True, repr=False)
class Comparison(Summary):
    """Two models on the same n labelled images.

    classes: the classes of both models, the data's first; labels: (n,); first, second: their predictions; cells: (n,)
    indices into CELLS; groups: (n,) of images that share a source, or None.
    """

    classes: tuple[str, ...]
    labels: Labels
    first: Answers
    second: Answers
    cells: Int[Tensor, " batch"]
    groups: Tensor | None = None

    def summary(self) -> Iterator[Line]:
        """The number of images in every cell, and the fields."""
        yield from (Line(cell, count, "images") for cell, count in self.counts.items())
        yield from super().summary()

    @property
    def counts(self) -> dict[str, int]:
        """The number of images in every cell; they sum to all images."""
        counts = torch.bincount(self.cells, minlength=len(CELLS)).tolist()
        return dict(zip(CELLS, counts))

    @property
    def p(self) -> float:
        """McNemar's exact two-sided p-value of equal accuracy."""
        counts = self.counts
        return mcnemar(counts[CELLS[SECOND_WRONG]], counts[CELLS[FIRST_WRONG]])

    def accuracies(self, *, seed: int = 0) -> tuple[Estimate, Estimate]:
        """The accuracy of each, with its interval."""
        first, second = (accuracy(model.correct, groups=self.groups, seed=seed) for model in (self.first, self.second))
        return first, second

    def difference(self, *, seed: int = 0) -> Estimate:
        """Accuracy of the first minus that of the second in points, with its paired interval."""
        return accuracy_difference(self.first.correct, self.second.correct, groups=self.groups, seed=seed)


def compare_answers(first: Evaluation, second: Evaluation) -> Comparison:
    """The comparison of two evaluations on the same labelled images; classes are matched by name.

    Raises InputError where the labels differ, by number or by name.
    """
    truths = [[evaluation.classes[label] for label in evaluation.labels.tolist()] for evaluation in (first, second)]
    if truths[0] != truths[1]:
        raise InputError(f"expected both models on the same images, found {len(truths[0])} and {len(truths[1])} labels")
    classes = tuple(dict.fromkeys((*first.classes, *second.classes)))
    first_answers, second_answers = _answers(first, classes), _answers(second, classes)
    cells = taxonomy(first.labels, first_answers.prediction, second_answers.prediction)
    return Comparison(classes, first.labels, first_answers, second_answers, cells, first.groups)


def taxonomy(labels: Labels, first: Labels, second: Labels) -> Int[Tensor, " batch"]:
    """The cell of each image, an index into CELLS, from the label and the two predictions."""
    first_right, second_right = first == labels, second == labels
    cells = torch.full_like(labels, BOTH_RIGHT)
    cells[~first_right & second_right] = FIRST_WRONG
    cells[first_right & ~second_right] = SECOND_WRONG
    cells[~first_right & ~second_right] = WRONG_DIFFERENTLY
    cells[~first_right & ~second_right & (first == second)] = WRONG_ALIKE
    return cells


@dataclass(frozen=True)
class Confusion:
    """A label and a wrong prediction: for how many images each model makes this error."""

    truth: str
    prediction: str
    first: int
    second: int


def confusions(comparison: Comparison) -> tuple[Confusion, ...]:
    """Every pair of label and wrong prediction of either model, the most frequent (of both together) first."""
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
    """The images of one class: their number, and the accuracy of each model on them."""

    name: str
    n: int
    first: Estimate
    second: Estimate


def by_class(comparison: Comparison, *, seed: int = 0) -> tuple[Slice, ...]:
    """One slice for each class that is the label of some image, in the order of the classes."""
    slices = []
    for label in comparison.labels.unique().tolist():
        inside = comparison.labels == label
        groups = None if comparison.groups is None else comparison.groups[inside]
        each = (
            accuracy(model.correct[inside], groups=groups, seed=seed) for model in (comparison.first, comparison.second)
        )
        slices.append(Slice(comparison.classes[label], int(inside.sum()), *each))
    return tuple(slices)


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
