"""Classes of a model and of data: by name, as ImageNet's 1000 in groups, and as targets in every form given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.data.cue_conflict import imagenet16
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.names import imagenet_classes
from vitlens.pixels import Parts
from vitlens.shapes import Labels, Logits

PREDICTED: Final = "predicted"
LABEL: Final = "label"


@dataclass(frozen=True)
class ClassMapping:
    """classes: the names of the columns that `read` returns, the data's first; read: maps the model's logits to them;
    note: a remark for a report, "" where classes were matched by name."""

    classes: tuple[str, ...]
    read: Callable[[Logits], Logits]
    note: str = ""


def reading(model: Sequence[str], data: Sequence[str]) -> ClassMapping:
    """The mapping from the logits of a model of these classes to the classes of the data: of ImageNet's 1000 classes to
    Geirhos's 16 by the mean probability of each group, else by name, as `match_classes`."""
    groups = imagenet16()
    if tuple(model) != imagenet_classes() or not set(data) <= groups.keys():
        columns, classes = match_classes(model, data)
        return ClassMapping(classes, lambda logits: logits[:, columns])
    names = (*data, *(name for name in groups if name not in set(data)))
    members = [list(groups[name]) for name in names]

    def grouped(logits: Logits) -> Logits:
        logarithms = logits.float().log_softmax(-1)
        columns = [logarithms[:, own].logsumexp(-1) - torch.tensor(float(len(own))).log() for own in members]
        return torch.stack(columns, 1)  # the logarithm of the mean probability of each group

    sizes = ", ".join(f"{name}: {len(groups[name])}" for name in data[:3]) + (", ..." if len(data) > 3 else "")
    return ClassMapping(
        names,
        grouped,
        "The data's classes are among the 16 of the cue conflicts (Geirhos 2019), so ImageNet's 1000 classes are "
        f"grouped into the 16, each with the mean probability of its group ({sizes}); the other classes are left out. "
        "Name folders by ImageNet's classes or wnids (tabby, n02123045) to evaluate among all 1000.",
    )


def match_classes(model: Sequence[str], data: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """The column of the model's logits for each class, and the names in that order.

    The data's classes come first, in the data's order, matched by name; a model with as many classes that are only
    numbered is matched by position. Raises InputError listing the differences.
    """
    if tuple(model) == tuple(data) or list(model) == [str(index) for index in range(len(data))]:
        return list(range(len(model))), tuple(data)
    place = {name: index for index, name in enumerate(model)}
    missing = [name for name in data if name not in place]
    if missing or len(place) != len(model):
        known = set(data)
        in_data, in_model = (
            (", ".join(map(repr, names[:5])) or "none") + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            for names in (missing, [name for name in model if name not in known])
        )
        raise InputError(
            f"expected the model's {len(model)} classes to include the data's {len(data)}; only in the data: "
            f"{in_data}; only in the model: {in_model}; name the model's with --classes FILE"
        )
    first = [place[name] for name in data]
    columns = [*first, *sorted(set(range(len(model))) - set(first))]
    return columns, tuple(model[index] for index in columns)


def label_columns(model: Sequence[str], split: Split) -> Labels:
    """The label of each image as a column of the logits of a model of these classes: (n,), on the CPU. Labels are
    converted only here; functions that take the result must not match names again."""
    if split.labels is None:
        raise DataError(f"expected labelled images, found images without labels in {split.name}")
    columns, _ = match_classes(model, split.classes)
    return torch.tensor(columns)[split.labels.cpu().long()]


def require_shared(first: Sequence[str], second: Sequence[str], data: Sequence[str]) -> None:
    """Raise InputError, naming the model, where the classes of one of two models do not match the data's."""
    for which, model in (("first", first), ("second", second)):
        try:
            reading(model, data)
        except InputError as error:
            raise InputError(f"the {which} model does not know the data's classes: {error}") from error


def class_targets(
    targets: Any,
    model: Model,
    count: int,
    *,
    split: Split | None = None,
    any_class: bool = False,
    words: tuple[str, str] = ("targets", LABEL),
) -> Labels | None:
    """Class indices (count,) among the model's logits; None for "predicted".

    targets: "predicted", "label" (of `split`), a class by name or by its index from 0, or one of these for each image,
    also as a tensor or an array of indices; any_class: "predicted" and "label" are refused, as targets of an attack
    must be other classes; words: what messages call the argument and the label. Raises InputError for "label" without
    labels and an index out of range, UnknownNameError for a class that does not exist.
    """
    what, label = words
    if isinstance(targets, Tensor | np.ndarray | np.generic):
        targets = targets.tolist()
    one = targets is None or (isinstance(targets, str | int) and not isinstance(targets, bool))
    listed = list(targets) if isinstance(targets, Sequence) else [targets]
    wrong = [] if one else [each for each in listed if isinstance(each, bool) or not isinstance(each, str | int)]
    if wrong:
        raise InputError(
            f"expected {what} as a class name, an index, or one for each image, found {wrong[0]!r}; give indices as "
            "whole numbers"
        )
    if any_class and targets in (PREDICTED, LABEL):
        raise InputError(f"expected target classes other than the labels, found {targets!r}; give a class, or None")
    if targets is None or targets == PREDICTED:
        return None
    model.require_classifier()
    if targets == label:
        if split is None or split.labels is None:
            images = "a tensor without labels" if split is None else f"images without labels in {split.name}"
            raise InputError(
                f"expected labelled images for {what}={label!r}, found {images}; give a Split, a folder of class "
                f"folders, or {what}=labels"
            )
        return label_columns(model.classes, split)
    if one:
        return torch.full((count,), class_index(targets, model.classes, words=words))
    indices = [class_index(target, model.classes, words=words) for target in listed]
    if len(indices) != count:
        raise InputError(f"expected one target per image ({count}), found {len(indices)}")
    return torch.tensor(indices)


def class_index(target: str | int, classes: tuple[str, ...], *, words: tuple[str, str] = ("targets", LABEL)) -> int:
    """The index of a class by its name, in any case, or by its number. Raises as `class_targets`."""
    if isinstance(target, str) and target in classes:
        return classes.index(target)
    what, label = words
    if isinstance(target, int) or target.removeprefix("-").isdecimal():
        index = int(target)
        if not 0 <= index < len(classes):
            raise InputError(f"expected {what} from 0 to {len(classes) - 1}, found {index}")
        return index
    folded = [name.lower() for name in classes]
    if target.lower() in folded:
        return folded.index(target.lower())
    raise UnknownNameError("class", target, (PREDICTED, label, *classes))


def required_labels(model: Model, images: Parts, labels: Tensor | str | None, size: int) -> Labels:
    """Labels as class indices (n,): those given, or for "predicted" what the model predicts."""
    if isinstance(labels, str) and labels == PREDICTED:
        return predicted_classes(model, images, size)
    if labels is None or isinstance(labels, str):
        value = "none" if labels is None else repr(labels)
        raise InputError(
            f"expected a label for each image, found {value}; give labels, a Split or a folder of class folders, or "
            f"labels={PREDICTED!r} to take what the model predicts"
        )
    labels = torch.as_tensor(labels)
    if len(images) != len(labels):
        raise InputError(f"expected images and a label for each, found {len(images)} and {len(labels)}")
    return labels


def predicted_classes(model: Model, images: Parts, size: int) -> Labels:
    """The predicted class of each image (n,), `size` images at a time; 0 of a model without a classifier."""
    if not model.has_classifier:  # the methods that it supports ignore the targets
        return torch.zeros(len(images), dtype=torch.int64)
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).argmax(-1) for part in images.split(size)])
