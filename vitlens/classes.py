"""Matches the classes of a model and of data, and reads target classes in every form.

`reading` and `match_classes` match the names of two lists of classes: their `model` and `data` are
these names. `class_targets` and the functions after it turn what a caller gives as targets or
labels into class indices: their `model` is a Model.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlens.data.cue_conflict import imagenet16
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.errors import DataError, InputError, UnknownNameError, argument
from vitlens.models.model import Model
from vitlens.names import imagenet_classes, imagenet_indices, is_index, plain_name
from vitlens.pixels import Parts
from vitlens.shapes import Labels, Logits

PREDICTED: Final = "predicted"
LABEL: Final = "label"
# a wnid, which may be followed by a name, as in n02085620-Chihuahua
_WNID: Final = re.compile(r"(n\d{8})(?:[-_ ]|$)")
_EXAMPLES: Final = 3  # classes listed in a note
_MOST_LISTED: Final = 5  # classes listed in an error


@dataclass(frozen=True)
class ClassMapping:
    """A mapping from a model's logits to the classes of data.

    classes: the names of the columns that `read` returns. The classes of the data come first.
    read: maps the model's logits to these columns.
    note: a note for a report, "" if classes were matched by name.
    """

    classes: tuple[str, ...]
    read: Callable[[Logits], Logits]
    note: str = ""


def reading(model: Sequence[str], data: Sequence[str]) -> ClassMapping:
    """Return the mapping from the logits of a model of these classes to the classes of the data.

    If the data has classes of Geirhos's 16, ImageNet's 1000 classes are grouped, each group with
    its mean probability. All other classes are matched by `match_classes`.

    model, data: the names of the classes.
    """
    groups = imagenet16()
    if tuple(model) != imagenet_classes() or not set(data) <= groups.keys():
        match = _matched(model, data)
        return ClassMapping(match.names, lambda logits: logits[:, match.columns], match.note)
    names = (*data, *(name for name in groups if name not in set(data)))
    members = [list(groups[name]) for name in names]

    def group_logits(logits: Logits) -> Logits:
        """Return the logarithm of the mean probability of each group."""
        log_probabilities = logits.float().log_softmax(-1)
        columns = []
        for indices in members:
            log_sum = log_probabilities[:, indices].logsumexp(-1)
            # the sum of the probabilities, divided by their number
            columns.append(log_sum - torch.tensor(float(len(indices))).log())
        return torch.stack(columns, 1)

    sizes = _examples([f"{name}: {len(groups[name])}" for name in data])
    return ClassMapping(
        names,
        group_logits,
        "The data's classes are among the 16 of the cue conflicts (Geirhos 2019). So "
        "ImageNet's 1000 classes are grouped into these 16, each with the mean "
        f"probability of its group ({sizes}). The other classes are left out. Name "
        "folders by ImageNet's classes or wnids (tabby, n02123045) to evaluate among "
        "all 1000.",
    )


def _examples(texts: Sequence[str]) -> str:
    listed = ", ".join(texts[:_EXAMPLES])
    return f"{listed}, ..." if len(texts) > _EXAMPLES else listed


class _Match(NamedTuple):
    """A match of classes.

    columns: the numbers of columns of the logits. The classes of the data come first.
    names: the names of these columns.
    note: a note for a report, "" for a match by name.
    """

    columns: list[int]
    names: tuple[str, ...]
    note: str = ""


def match_classes(model: Sequence[str], data: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Return the column of the model's logits for each class, and the names in that order.

    The data's classes come first, in the data's order. They are matched by name if all names of the
    data are among the model's:
    - case, underscores, hyphens and leading zeros do not count if the names stay distinct;
    - a wnid is the name of its ImageNet class;
    - of several names, separated by commas, the first counts.

    If one side has only numbers as names, and both have as many classes, they are matched by
    position. `position_note` then returns a note. Raises InputError, with the differences, if
    nothing matches.
    """
    columns, names, _ = _matched(model, data)
    return columns, names


def position_note(model: Sequence[str], data: Sequence[str]) -> str:
    """Return a note on classes matched by position; "" for a match by name, and for no match."""
    try:
        return _matched(model, data).note
    except InputError:
        return ""


def _matched(model: Sequence[str], data: Sequence[str]) -> _Match:
    if tuple(model) == tuple(data):
        return _Match(list(range(len(model))), tuple(data))
    for normalise in (str, _normalise, _first_name):  # from strict to lenient
        model_names = [normalise(name) for name in model]
        data_names = [normalise(name) for name in data]
        columns = _columns_by_name(model_names, data_names)
        if columns is not None:
            other_columns = sorted(set(range(len(model))) - set(columns))
            other_names = [model[column] for column in other_columns]
            return _Match([*columns, *other_columns], (*data, *other_names))
    # If one side has only the numbers 0, 1, 2, ... as names, classes are matched by position.
    numbers = [str(index) for index in range(len(data))]
    if len(model) == len(data):
        if list(model) == numbers:
            return _Match(list(range(len(model))), tuple(data), _note_on_numbered_model(data))
        if sorted(data, key=_natural) == numbers:
            columns = [int(name) for name in data]
            return _Match(columns, tuple(data), _note_on_numbered_data(model))
    raise _mismatch(model, data)


def _columns_by_name(model: Sequence[str], data: Sequence[str]) -> list[int] | None:
    """Return the column of each name of the data.

    It is None unless the names are distinct and the model has all of them.
    """
    column_of_name = {name: index for index, name in enumerate(model)}
    are_distinct = len(column_of_name) == len(model) and len(set(data)) == len(data)
    if not are_distinct or any(name not in column_of_name for name in data):
        return None
    return [column_of_name[name] for name in data]


def _normalise(name: str) -> str:
    """Return a name without case, separators and leading zeros; a wnid becomes its class's name."""
    wnid = _WNID.match(name)
    if wnid is not None:
        index = imagenet_indices().get(wnid[1])
        if index is not None:
            name = imagenet_classes()[index]
    return plain_name(name)


def _first_name(name: str) -> str:
    """Return the first of several names of a class, normalised: "tench" of "tench, Tinca tinca"."""
    return _normalise(name.partition(",")[0])


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts 2 before 10 and ignores case, as timm sorts folders."""
    key = []
    for part in re.split(r"(\d+)", name.lower()):
        # numbers before words; a number is compared as a number
        if is_index(part):
            key.append((0, int(part), ""))
        else:
            key.append((1, 0, part))
    return key


def _note_on_numbered_model(data: Sequence[str]) -> str:
    note = (
        "The model's classes are only numbered, so classes are matched by position. "
        f"Logits 0, 1, 2, ... stand for {_examples(data)}, in the order of the data "
        "(folders sorted as text, as torchvision sorts them)."
    )
    natural = sorted(data, key=_natural)
    if natural != list(data):
        note += (
            f" timm sorts folders differently ({_examples(natural)}), so the logits of a "
            "model trained with timm would be misread."
        )
    names = argument("classes", flag="classes FILE")
    return f"{note} To match by name, give the names in the order of the logits with {names}."


def _note_on_numbered_data(model: Sequence[str]) -> str:
    return (
        "The data's classes are only numbered, so classes are matched by position: 0, "
        f"1, 2, ... stand for the model's {_examples(model)}. To match by name, name the "
        "data's folders after the model's classes."
    )


def _mismatch(model: Sequence[str], data: Sequence[str]) -> InputError:
    model_names = {_normalise(name) for name in model}
    data_names = {_normalise(name) for name in data}
    only_in_data = [name for name in data if _normalise(name) not in model_names]
    only_in_model = [name for name in model if _normalise(name) not in data_names]
    classes = argument("classes", flag="classes FILE")
    hint = f"name the model's with {classes}"
    if not only_in_data:  # names that are not distinct
        hint = f"give every class a different name with {classes}"
    return InputError(
        f"expected the model's {len(model)} classes to include the data's {len(data)}; only in the "
        f"data: {_list_names(only_in_data)}; only in the model: {_list_names(only_in_model)}; "
        f"{hint}"
    )


def _list_names(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_MOST_LISTED])) or "none"
    if len(names) > _MOST_LISTED:
        listed += f" and {len(names) - _MOST_LISTED} more"
    return listed


def label_columns(model: Sequence[str], split: Split) -> Labels:
    """Return each image's label (n,), on the CPU, as a column of the logits of a model.

    Labels are converted only here. Functions that take the result must not match names again.

    model: the names of the model's classes.
    """
    if split.labels is None:
        raise DataError(f"expected labelled images, found images without labels in {split.name}")
    columns, _ = match_classes(model, split.classes)
    return torch.tensor(columns)[split.labels.cpu().long()]


def require_shared(first: Sequence[str], second: Sequence[str], data: Sequence[str]) -> None:
    """Raise InputError, with the name of the model, if its classes do not match the data's."""
    for position, model in (("first", first), ("second", second)):
        try:
            reading(model, data)
        except InputError as error:
            raise InputError(
                f"the {position} model does not know the data's classes: {error}"
            ) from error


def class_targets(
    targets: Any,
    model: Model,
    count: int,
    *,
    split: Split | None = None,
    only_classes: bool = False,
    words: tuple[str, str] = ("targets", LABEL),
) -> Labels | None:
    """Return class indices (count,) among the model's logits; None for "predicted".

    targets: "predicted", "label" (of `split`), or a class by its name or its index from 0. One of
        these may be given for each image. Indices may be a tensor or an array.
    only_classes: refuse "predicted" and "label", as the targets of an attack must be other classes.
    words: the name of the argument in messages, and the word that is accepted for the labels in
        place of "label", such as "true".

    Raises InputError for "label" without labels and an index out of range, UnknownNameError for a
    class that does not exist.
    """
    if targets is None:
        return None
    argument_name, label = words
    if isinstance(targets, Tensor | np.ndarray | np.generic):
        targets = targets.tolist()
    is_one_class = _is_class(targets)
    if not is_one_class:
        targets = list(targets) if isinstance(targets, Sequence) else [targets]
        for target in targets:
            if not _is_class(target):
                raise InputError(
                    f"expected {argument_name} as a class name, an index, or one for each image, "
                    f"found {target!r}; give indices as whole numbers"
                )
    if only_classes and targets in (PREDICTED, label):
        raise InputError(
            f"expected target classes other than the labels, found {targets!r}; give a class, or "
            "None"
        )
    if targets == PREDICTED:
        return None
    model.require_classifier()
    if targets == label:
        if split is None or split.labels is None:
            images = "a tensor without labels"
            if split is not None:
                images = f"images without labels in {split.name}"
            raise InputError(
                f"expected labelled images for {argument_name}={label!r}, found {images}; give a "
                f"Split, a folder of class folders, or {argument_name}=labels"
            )
        return label_columns(model.classes, split)
    if is_one_class:
        return torch.full((count,), class_index(targets, model.classes, words=words))
    indices = [class_index(target, model.classes, words=words) for target in targets]
    if len(indices) != count:
        raise InputError(f"expected one target per image ({count}), found {len(indices)}")
    return torch.tensor(indices)


def _is_class(target: object) -> bool:
    """Return True for a name or an index, but not for a bool, which is an int in Python."""
    return isinstance(target, str | int) and not isinstance(target, bool)


def class_index(
    target: str | int, classes: tuple[str, ...], *, words: tuple[str, str] = ("targets", LABEL)
) -> int:
    """Return the index of a class by its name, in upper or lower case, or by its number.

    Raises the errors of `class_targets`.
    """
    if isinstance(target, str) and target in classes:
        return classes.index(target)
    argument_name, label = words
    if isinstance(target, int) or target.removeprefix("-").isdecimal():
        index = int(target)
        if not 0 <= index < len(classes):
            raise InputError(
                f"expected {argument_name} from 0 to {len(classes) - 1}, found {index}"
            )
        return index
    folded = [name.lower() for name in classes]
    if target.lower() in folded:
        return folded.index(target.lower())
    raise UnknownNameError("class", target, (PREDICTED, label, *classes))


def required_labels(model: Model, images: Parts, labels: Tensor | str | None, size: int) -> Labels:
    """Return labels as class indices (n,); for "predicted" the model's predictions."""
    if isinstance(labels, str) and labels == PREDICTED:
        return predicted_classes(model, images, size)
    if labels is None or isinstance(labels, str):
        value = "none" if labels is None else repr(labels)
        raise InputError(
            f"expected a label for each image, found {value}; give labels, a Split or a "
            f"folder of class folders, or labels={PREDICTED!r} to use what the model "
            "predicts"
        )
    labels = torch.as_tensor(labels)
    if len(images) != len(labels):
        raise InputError(
            f"expected images and a label for each, found {len(images)} and {len(labels)}"
        )
    return labels


def predicted_classes(model: Model, images: Parts, size: int) -> Labels:
    """Return the predicted class of each image (n,), computed `size` images at a time.

    It is 0 for a model without a classifier.
    """
    if not model.has_classifier:  # methods that work without a classifier ignore the targets
        return torch.zeros(len(images), dtype=torch.int64)
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).argmax(-1) for part in images.split(size)])
