"""Target classes in every form that they are given in: the predicted one, the label, a name, an index, or a tensor."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.classes import label_columns
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.pixels import Parts
from vitlens.shapes import Labels

PREDICTED: Final = "predicted"
LABEL: Final = "label"


def class_targets(
    targets: object,
    model: Model,
    count: int,
    *,
    split: Split | None = None,
    any_class: bool = False,
    words: tuple[str, str] = ("targets", LABEL),
) -> Labels | None:
    """Class indices (count,) among the model's logits; None for "predicted".

    targets: "predicted", "label" (of `split`), a class by name or by its index from 0, or one of these for each image,
    also as a tensor or an array of indices.
    any_class: "predicted" and "label" are refused, as targets of an attack must be other classes. words: what messages
    call the argument and the label. Raises InputError for "label" without labels and an index out of range,
    UnknownNameError for a class that does not exist.
    """
    targets = _as_listed(targets, words[0])
    if any_class and targets in (PREDICTED, LABEL):
        raise InputError(f"expected target classes other than the labels, found {targets!r}; give a class, or None")
    if targets is None or targets == PREDICTED:
        return None
    model.require_classifier()
    what, label = words
    if targets == label:
        if split is None or split.labels is None:
            images = "a tensor without labels" if split is None else f"images without labels in {split.name}"
            raise InputError(
                f"expected labelled images for {what}={label!r}, found {images}; give a Split, a folder of class "
                f"folders, or {what}=labels"
            )
        return label_columns(model.classes, split)
    if isinstance(targets, str | int):
        return torch.full((count,), class_index(targets, model.classes, words=words))
    indices = [class_index(target, model.classes, words=words) for target in targets]
    if len(indices) != count:
        raise InputError(f"expected one target per image ({count}), found {len(indices)}")
    return torch.tensor(indices)


def _as_listed(targets: Any, what: str) -> str | int | list[int | str] | None:
    """Targets as they are, or as a list of them. Raises InputError for anything else."""
    if isinstance(targets, Tensor | np.ndarray | np.generic):
        targets = targets.tolist()
    if targets is None or (isinstance(targets, str | int) and not isinstance(targets, bool)):
        return targets
    listed = list(targets) if isinstance(targets, Sequence) else None
    wrong = [targets] if listed is None else [each for each in listed if isinstance(each, bool)]
    wrong += [each for each in listed or () if not isinstance(each, str | int)]
    if wrong:
        raise InputError(
            f"expected {what} as a class name, an index, or one for each image, found {wrong[0]!r}; give indices as "
            "whole numbers"
        )
    return listed


def class_index(target: str | int, classes: tuple[str, ...], *, words: tuple[str, str] = ("targets", LABEL)) -> int:
    """The index of a class by its name, in any case, or by its number. Raises as `class_targets`."""
    if isinstance(target, str) and target in classes:
        return classes.index(target)
    what, label = words
    if not isinstance(target, str) or target.isdecimal() or target.removeprefix("-").isdecimal():
        index = int(target)
        if not 0 <= index < len(classes):
            raise InputError(f"expected {what} from 0 to {len(classes) - 1}, found {index}")
        return index
    folded = [name.lower() for name in classes]
    if target.lower() in folded:
        return folded.index(target.lower())
    raise UnknownNameError("class", target, (PREDICTED, label, *classes))


def labels_of(model: Model, split: Split) -> Labels | None:
    """The label of each image as a column of the model's logits (n,), or None where the split has no labels."""
    return None if split.labels is None else label_columns(model.classes, split)


def required_labels(model: Model, images: Parts, labels: Tensor | str | None, *, batch_size: int | None) -> Labels:
    """Labels as class indices (n,): those given, or what the model predicts for "predicted".

    Raises InputError for none, and for another number than of images.
    """
    if isinstance(labels, str) and labels == PREDICTED:
        return predicted_classes(model, images, batch_size or fitting_batch_size(model))
    if labels is None or isinstance(labels, str):
        value = "none" if labels is None else repr(labels)
        raise InputError(
            f"expected a label for each image, found {value}; give labels, a Split or a folder of class folders, or "
            f"labels={PREDICTED!r} to take what the model predicts"
        )
    if len(images) != len(labels):
        raise InputError(f"expected images and a label for each, found {len(images)} and {len(labels)}")
    return labels


def predicted_classes(model: Model, images: Parts, size: int) -> Labels:
    """The predicted class of each image (n,), `size` images at a time; 0 of a model without a classifier."""
    if not model.has_classifier:  # the methods that it supports ignore the targets
        return torch.zeros(len(images), dtype=torch.int64)
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).argmax(-1) for part in images.split(size)])
