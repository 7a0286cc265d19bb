"""Errors of two models on the same labelled images, and a model's shape bias (Geirhos 2019)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import Evaluation, accuracy, evaluate, predicted_logits
from vitlens.analysis.failures.rows import ClassBias
from vitlens.classes import reading, require_shared
from vitlens.data.cue_conflict import Cues, cues_of
from vitlens.data.split import Split, as_split
from vitlens.errors import DataError, InputError, argument
from vitlens.inputs import takes_splits
from vitlens.models.model import Model
from vitlens.pixels import AnyImages
from vitlens.shapes import Labels
from vitlens.summary import Line, Summary, Table
from vitlens.uncertainty import Estimate, accuracy_difference, paired_test

CELLS: Final = (
    "both right",
    "only first wrong",
    "only second wrong",
    "both wrong, alike",
    "both wrong, differently",
)


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """Two models on the same n labelled images.

    first, second: the evaluations of both models. The classes are those of both models, with the
        data's first.
    """

    first: Evaluation
    second: Evaluation

    def summary(self) -> Iterator[Line]:
        """Yield the number of images in every cell, and the fields."""
        yield from (Line(cell, count, "images") for cell, count in self.counts.items())
        yield from super().summary()

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each image: its label, the prediction of both models, and its cell."""
        cells = self.cells.tolist()
        predictions = zip(self.first.records(), self.second.records(), strict=True)
        for image, (first, second) in enumerate(predictions):
            yield {
                "image": image,
                "label": first["label"],
                "first": first["prediction"],
                "second": second["prediction"],
                "cell": CELLS[cells[image]],
            }

    @property
    def cells(self) -> Int[Tensor, " batch"]:
        """Return for each image an index into CELLS."""
        first_wrong = ~self.first.correct
        second_wrong = ~self.second.correct
        is_alike = self.first.predictions == self.second.predictions
        both_wrong = torch.where(is_alike, 3, 4)
        # 0 if both are right, 1 if only the first is wrong, 2 if only the second is wrong
        at_most_one_wrong = first_wrong.long() + 2 * second_wrong.long()
        return torch.where(first_wrong & second_wrong, both_wrong, at_most_one_wrong)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of images in every cell; they sum to all images."""
        return dict(zip(CELLS, torch.bincount(self.cells, minlength=len(CELLS)).tolist()))

    @property
    def p(self) -> float:
        """Return the two-sided p-value of equal accuracy.

        It is McNemar's exact test, or a sign test over groups if images share a source.
        """
        return paired_test(self.first.correct, self.second.correct, groups=self.first.groups)

    def accuracies(self) -> tuple[Estimate, Estimate]:
        """Return the accuracy of each, with its interval."""
        first = accuracy(self.first.correct, groups=self.first.groups)
        second = accuracy(self.second.correct, groups=self.second.groups)
        return first, second

    def difference(self, *, seed: int = 0) -> Estimate:
        """Return the accuracy of the first minus that of the second, points, paired."""
        return accuracy_difference(
            self.first.correct, self.second.correct, groups=self.first.groups, seed=seed
        )


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
    """Compare the predictions of two models on the same labelled images.

    The comparison has the cell of the error taxonomy for each image.

    Classes are matched by name.

    images: a Split, or any form that `vitlens.images` takes, prepared for the first model.
    labels: class indices of the first model (n,) (None: those of the Split or the class folders).
    second_images: the same images in the same order, prepared for the second model (None: the same
        pixels).

    Raises DataError without labels, and InputError if a model does not know the data's classes.

    >>> import vitlens
    >>> vit, cnn = vitlens.load("vit-digits"), vitlens.load("cnn-digits")
    >>> comparison = vitlens.compare(vit, cnn, vitlens.load_data("digits", limit=20))
    >>> sum(comparison.counts.values())
    20
    """
    first_split = as_split(images)
    second_split = as_split(images if second_images is None else second_images)
    for model in (first, second):
        model.require_classifier()
    require_shared(first.classes, second.classes, first_split.classes)
    evaluations = [
        evaluate(model, split, batch_size=batch_size, precision=precision, advance=advance)
        for model, split in ((first, first_split), (second, second_split))
    ]
    return compare_evaluations(*evaluations)


def compare_evaluations(first: Evaluation, second: Evaluation) -> Comparison:
    """Return the comparison of two evaluations on the same labelled images.

    Classes are matched by name. A class that a model does not have gets a logit of minus infinity.
    Raises InputError if the labels of both differ.
    """
    classes = tuple(dict.fromkeys((*first.classes, *second.classes)))
    first = _with_classes(first, classes)
    second = _with_classes(second, classes)
    if len(first.labels) != len(second.labels):
        raise InputError(
            f"expected both models on the same images, found {len(first.labels)} and "
            f"{len(second.labels)} labels"
        )
    unequal = int((first.labels != second.labels).sum())
    if unequal:
        raise InputError(
            f"expected both models on the same images, found different labels at {unequal} of "
            f"{len(first.labels)}"
        )
    return Comparison(first, second)


def _with_classes(evaluation: Evaluation, classes: tuple[str, ...]) -> Evaluation:
    # the new column of each class
    columns = torch.tensor([classes.index(name) for name in evaluation.classes])
    logits = torch.full((len(evaluation.logits), len(classes)), -torch.inf)
    logits[:, columns] = evaluation.logits
    labels = columns[evaluation.labels]
    return replace(evaluation, classes=classes, logits=logits, labels=labels)


@dataclass(frozen=True, repr=False)
class ShapeBias(Summary):
    """A model's shape bias on n images of different shape and texture.

    alias: the alias of the model.
    bias: the share of predictions of the shape's class among those of the shape's or the texture's
        class. None if there are no such predictions.
    shape, texture: the share of all images that are predicted as the shape's or texture's class.
    by_class: the counts for each class of shapes.
    note: a note on how classes were matched.
    """

    alias: str
    bias: Estimate | None
    shape: Estimate
    texture: Estimate
    by_class: tuple[ClassBias, ...]
    note: str = ""


@takes_splits
def shape_bias(
    model: Model,
    images: AnyImages,
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> ShapeBias:
    """Measure the shape bias of a model on images named shapeN-textureM.

    ImageNet's classes are grouped into the 16 of Geirhos 2019. Intervals are over the sources of
    shapes, because images that share a source are alike.

    images: a Split, or a folder with such images in folders of their shape's class.

    Raises DataError for other images, and InputError if the classes do not match.

    >>> import vitlens
    >>> from vitlens.models.loading import untrained
    >>> data = vitlens.load_data("shapes-conflict", limit=16)
    >>> vitlens.shape_bias(untrained("resnet20", classes=data.classes), data).shape.n
    16
    """
    split = as_split(images)
    model.require_classifier()
    cues = require_cues(split)
    mapping = reading(model.classes, split.classes)
    logits = predicted_logits(
        model, split, batch_size=batch_size, precision=precision, advance=advance
    )
    conflict = cues.conflict  # without images of equal shape and texture
    predictions = mapping.read(logits).argmax(-1)[conflict]
    shape = cues.shape[conflict]
    groups = cues.source[conflict]
    by_shape = predictions == shape
    by_texture = predictions == cues.texture[conflict]
    decided = by_shape | by_texture
    bias = accuracy(by_shape[decided], groups=groups[decided]) if decided.any() else None
    by_class = list[ClassBias]()
    for index in shape.unique().tolist():
        in_class = shape == index
        shape_count = int(by_shape[in_class].sum())
        texture_count = int(by_texture[in_class].sum())
        decided_count = shape_count + texture_count
        by_class.append(
            ClassBias(
                model=model.alias,
                class_name=split.classes[index],
                n=int(in_class.sum()),
                shape=shape_count,
                texture=texture_count,
                share=shape_count / decided_count if decided_count else None,
            )
        )
    return ShapeBias(
        alias=model.alias,
        bias=bias,
        shape=accuracy(by_shape, groups=groups),
        texture=accuracy(by_texture, groups=groups),
        by_class=tuple(by_class),
        note=mapping.note,
    )


def require_cues(split: Split) -> Cues:
    """Return the cues of a split.

    Raises DataError if its file names contain none, or if no image has conflicting cues.
    """
    cues = cues_of(split)
    if cues is None or not cues.conflict.any():
        raise DataError(
            "expected images named shapeN-textureM in folders of their shape's class, found "
            f"others in {split.name}; try {argument('name', 'shapes-conflict', flag='data')}"
        )
    return cues
