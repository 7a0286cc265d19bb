"""Comparison of two models' predictions on the same labelled images."""

from collections.abc import Callable

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import Evaluation, answers, require_labels
from vitlens.analysis.failures.errors import Comparison, compare_answers
from vitlens.data.split import Split, as_split, takes_splits
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.pixels import AnyImages
from vitlens.shapes import Labels


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
    evaluated = evaluations(
        (first, second),
        (split, split if second_images is None else as_split(second_images)),
        batch_size=batch_size,
        precision=precision,
        advance=advance,
    )
    return compare_answers(*evaluated)


def evaluations(
    models: tuple[Model, Model],
    splits: tuple[Split, Split],
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Evaluation, Evaluation]:
    """The evaluations of both models in the data's classes; raises as `compare`."""
    for model in models:
        require(model, *needs_of("compare"))
    if len(splits[0]) != len(splits[1]) or splits[0].classes != splits[1].classes:
        raise InputError(f"expected the same images for both models, found {len(splits[0])} and {len(splits[1])}")
    for model in models:
        model.require_classifier()
    readings = require_shared(models[0].classes, models[1].classes, splits[0].classes)
    evaluated = []
    for model, split, read in zip(models, splits, readings):
        labels = require_labels(split).cpu().long()
        logits = answers(model, split, batch_size=batch_size, precision=precision, advance=advance)
        evaluated.append(Evaluation(model.alias, read.classes, read.read(logits), labels, split.groups))
    return evaluated[0], evaluated[1]
