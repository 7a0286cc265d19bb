"""Which class a run is about: the predicted one, the true one, or one that is named."""

from typing import Final

from torch import Tensor

from vitlens.analysis.evaluation.classes import class_targets, label_columns
from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.commands.run.options import RunOptions
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model

TRUE: Final = "true"


def chosen_targets(target: str, model: Model, split: Split) -> Tensor | None:
    """Class indices (n,) among the model's logits for "true" or a named class; None for "predicted".

    target: also a class by name or by its index from 0. Raises InputError for "true" without labels and for an index
    out of range, UnknownNameError for a class that is not there.
    """
    if target == TRUE and split.labels is None:
        model.require_classifier()
        raise InputError("expected labelled images for --target true, found none; give --data, or a class")
    return class_targets(target, model, len(split), split=split, words=("--target", TRUE))


def labels_of(model: Model, split: Split, *, predicted: bool, doing: str, options: RunOptions) -> Tensor:
    """The class of each image as a column of the model's logits (n,): its label, or the prediction (predicted).

    doing: what the labels are for, in the words of the message ("attack"). Raises DataError for images without labels.
    """
    if predicted:
        return predicted_logits(model, split, batch_size=options.batch_size).argmax(-1)
    require_labelled(split, doing=doing)
    return label_columns(model.classes, split)


def require_labelled(split: Split, *, doing: str) -> None:
    """Raise DataError for images without labels, naming --predicted."""
    if split.labels is not None and len(split):
        return
    images = "images without labels" if len(split) else "no images"
    raise DataError(
        f"expected labelled images to {doing}, found {images} in {split.name}; give --labels FILE.csv, or add "
        "--predicted to take what the model predicts for the label"
    )
