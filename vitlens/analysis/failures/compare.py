"""`vitlens.compare`: the errors of two models on the same images, of both or of one only, alike or not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import Evaluation, accuracy, evaluate
from vitlens.data.split import as_split, takes_splits
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import require_supported
from vitlens.pixels import AnyImages
from vitlens.shapes import Labels
from vitlens.summary import Line, Summary
from vitlens.uncertainty import Estimate, accuracy_difference, mcnemar

CELLS: Final = ("both right", "only first wrong", "only second wrong", "both wrong, alike", "both wrong, differently")


@dataclass(frozen=True, repr=False)
class Comparison(Summary):
    """Two models on the same n labelled images.

    first, second: their predictions in the classes of both, the data's first (the logit of a class that a model does
    not have is minus infinity); cells: (n,) indices into CELLS.
    """

    first: Evaluation
    second: Evaluation
    cells: Int[Tensor, " batch"]

    def summary(self) -> Iterator[Line]:
        """The number of images in every cell, and the fields."""
        yield from (Line(cell, count, "images") for cell, count in self.counts.items())
        yield from super().summary()

    @property
    def counts(self) -> dict[str, int]:
        """The number of images in every cell; they sum to all images."""
        return dict(zip(CELLS, torch.bincount(self.cells, minlength=len(CELLS)).tolist()))

    @property
    def p(self) -> float:
        """McNemar's exact two-sided p-value of equal accuracy."""
        return mcnemar(self.counts["only second wrong"], self.counts["only first wrong"])

    def accuracies(self, *, seed: int = 0) -> tuple[Estimate, Estimate]:
        """The accuracy of each, with its interval."""
        first, second = (accuracy(each.correct, groups=each.groups, seed=seed) for each in (self.first, self.second))
        return first, second

    def difference(self, *, seed: int = 0) -> Estimate:
        """Accuracy of the first minus that of the second in points, with its paired interval."""
        return accuracy_difference(self.first.correct, self.second.correct, groups=self.first.groups, seed=seed)


@takes_splits
def compare(
    first: Model,
    second: Model,
    images: AnyImages,
    labels: Labels | None = None,  # noqa: ARG001  the decorator gives them to the images
    *,
    second_images: AnyImages | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Comparison:
    """The predictions of two models on the same labelled images, with the cell of the error taxonomy for each image.

    images: a Split, or any form that `vitlens.images` takes, prepared for the first model; labels: class indices of the
    first model (n,) (None: those of the Split or the class folders); second_images: the same images in the same order,
    prepared for the second model (None: the same pixels). Classes are matched by name. Raises DataError without labels,
    InputError when a model does not know the data's classes.

    >>> import vitlens
    >>> vit, cnn = vitlens.load("vit-digits"), vitlens.load("cnn-digits")
    >>> comparison = vitlens.compare(vit, cnn, vitlens.load_data("digits", limit=20))
    >>> sum(comparison.counts.values())
    20
    """
    split = as_split(images)
    for model in (first, second):
        require_supported(model, "compare")
    require_shared(first.classes, second.classes, split.classes)
    both = (first, split), (second, split if second_images is None else as_split(second_images))
    passes = {"batch_size": batch_size, "precision": precision, "advance": advance}
    return compare_answers(*(evaluate(model, own, **passes) for model, own in both))  # type: ignore[arg-type]


def compare_answers(first: Evaluation, second: Evaluation) -> Comparison:
    """The comparison of two evaluations on the same labelled images; classes are matched by name.

    Raises InputError where the labels differ, by number or by name.
    """
    truths = [[evaluation.classes[label] for label in evaluation.labels.tolist()] for evaluation in (first, second)]
    if truths[0] != truths[1]:
        raise InputError(f"expected both models on the same images, found {len(truths[0])} and {len(truths[1])} labels")
    classes, shared = tuple(dict.fromkeys((*first.classes, *second.classes))), []
    for each in (first, second):
        logits = each.logits.new_full((len(each.logits), len(classes)), -torch.inf)
        logits[:, [classes.index(name) for name in each.classes]] = each.logits
        shared.append(replace(each, classes=classes, logits=logits, labels=first.labels))
    one, two = shared
    wrong = torch.where(one.predictions == two.predictions, 3, 4)
    cells = torch.where(one.correct, torch.where(two.correct, 0, 2), torch.where(two.correct, 1, wrong))
    return Comparison(one, two, cells)
