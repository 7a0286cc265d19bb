"""The classes that a run is about: the predicted ones, the true ones, or one that is named.

Checks of labels come in pairs: before a model is loaded, by what --data and --images name, and
after, by the images that were read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from vitlens.analysis.evaluation.evaluate import predicted_logits, without_labels
from vitlens.classes import class_targets, label_columns
from vitlens.commands.run.options import RunOptions
from vitlens.data.catalogue import reader_of
from vitlens.data.folder import list_folder
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model

TRUE: Final = "true"
FOLDER: Final = "vitlens.data.folder:load"  # what reads class folders, or loose images


def chosen_targets(target: str, model: Model, split: Split) -> Tensor | None:
    """Return the target class of each image (n,) as indices into the model's logits.

    Returns None for "predicted".

    target: "true", "predicted", or a class by name or by its index from 0.

    Raises InputError for "true" without labels and for an index out of range, UnknownNameError for
    a class that is not there.
    """
    if target == TRUE and split.labels is None:
        model.require_classifier()  # its error comes first: without a classifier, labels are no use
        raise InputError(
            "expected labelled images for --target true, found none; give --data, or a class"
        )
    return class_targets(target, model, len(split), split=split, words=("--target", TRUE))


def labels_of(
    model: Model, split: Split, *, predicted: bool, doing: str, options: RunOptions
) -> Tensor:
    """Return the class of each image as a column of the model's logits (n,).

    predicted: True for the predictions, False for the labels.
    doing: what the labels are for, in the words of the message ("attack").

    Raises DataError for images without labels.
    """
    if predicted:
        return predicted_logits(model, split, batch_size=options.batch_size).argmax(-1)
    require_labelled(split, doing=doing)
    return label_columns(model.classes, split)


def require_labelled(split: Split, *, doing: str) -> None:
    """Raise DataError for images without labels; the message proposes --predicted."""
    if not len(split):
        raise _without_labels("no images", split.name, doing)
    if split.labels is None:
        raise _without_labels("images without labels", split.name, doing)


def require_label_source(data: str | None, images: Sequence[str], *, doing: str) -> None:
    """Raise DataError for image files and for a folder without classes, before a model is loaded.

    The message proposes --predicted.
    """
    name = unlabelled_source(data, images)
    if name is not None:
        raise _without_labels("images without labels", name, doing)


def require_evaluable(data: str | None) -> None:
    """Raise DataError for a folder without classes, before a model is loaded.

    The message proposes vitlens predict.
    """
    name = unlabelled_source(data, ())
    if name is not None:
        raise without_labels("images without labels", name)


def unlabelled_source(data: str | None, images: Sequence[str]) -> str | None:
    """Return a name for images that have no labels, before any is read.

    Returns None where they may have some, and for missing files, which an error names later.
    """
    if images and not data:
        are_there = all(Path(image).expanduser().exists() for image in images)
        return "images" if are_there else None
    if not data or data in SETS:
        return None
    path = Path(data).expanduser()
    if not path.is_dir() or reader_of(data, path) != FOLDER:
        return None
    has_labels = bool(list_folder(path, part="test").labels)
    return None if has_labels else str(path)


def _without_labels(images: str, name: str, doing: str) -> DataError:
    return DataError(
        f"expected labelled images to {doing}, found {images} in {name}; give --labels FILE.csv, "
        "or add --predicted to take what the model predicts for the label"
    )
