"""Mapping a model's logits to the data's classes: by name, or ImageNet's 1000 classes as groups of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.data.cue_conflict import imagenet16
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError
from vitlens.labels import imagenet_classes
from vitlens.shapes import Labels, Logits


@dataclass(frozen=True)
class ClassMapping:
    """classes: the names of the columns that `read` returns, the data's first; read: maps the model's logits to them;
    note: a remark for a report, "" where classes were matched by name."""

    classes: tuple[str, ...]
    read: Callable[[Logits], Logits]
    note: str = ""


def reading(model: Sequence[str], data: Sequence[str]) -> ClassMapping:
    """The mapping from the logits of a model of these classes to the classes of the data.

    ImageNet's 1000 classes are mapped to Geirhos's 16 by the mean probability of each group; otherwise classes are
    matched by name. Raises InputError listing the differences.
    """
    groups = imagenet16()
    if tuple(model) == imagenet_classes() and set(data) <= groups.keys():
        names = (*data, *(name for name in groups if name not in set(data)))
        note = _grouping_note(data, groups)
        return ClassMapping(names, lambda logits: grouped(logits, [groups[name] for name in names]), note)
    columns, classes = match_classes(model, data)
    return ClassMapping(classes, lambda logits: logits[:, columns])


def match_classes(model: Sequence[str], data: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """The column of the model's logits for each class, and the names in that order.

    The data's classes come first, in the data's order, matched by name; a model with as many classes that are only
    numbered is matched by position. Raises InputError listing the differences.
    """
    if tuple(model) == tuple(data) or _are_numbers(model, len(data)):
        return list(range(len(model))), tuple(data)
    place = {name: index for index, name in enumerate(model)}
    missing = [name for name in data if name not in place]
    if missing or len(place) != len(model):
        only = [name for name in model if name not in set(data)]
        raise InputError(
            f"expected the model's {len(model)} classes to include the data's {len(data)}; only in the data: "
            f"{_first_few(missing)}; only in the model: {_first_few(only)}; name the model's with --classes FILE"
        )
    columns = [place[name] for name in data]
    taken = set(columns)
    columns += [index for index in range(len(model)) if index not in taken]
    return columns, tuple(model[index] for index in columns)


def label_columns(model: Sequence[str], split: Split) -> Labels:
    """The label of each image as a column of the logits of a model of these classes: (n,), on the CPU.

    Labels are converted only here; functions that take the result must not match names again. Raises DataError
    for a split without labels, InputError where a class of the data is none of the model's.
    """
    if split.labels is None:
        raise DataError(f"expected labelled images, found images without labels in {split.name}")
    columns, _ = match_classes(model, split.classes)
    return torch.tensor(columns)[split.labels.cpu().long()]


def grouped(logits: Logits, groups: Sequence[Sequence[int]]) -> Float[Tensor, "batch groups"]:
    """The logarithm of the mean probability of each group of classes (Geirhos 2019): (batch, groups)."""
    logarithms = logits.float().log_softmax(-1)
    columns = [logarithms[:, list(group)].logsumexp(-1) - torch.tensor(float(len(group))).log() for group in groups]
    return torch.stack(columns, 1)


def require_shared(
    first: Sequence[str], second: Sequence[str], data: Sequence[str]
) -> tuple[ClassMapping, ClassMapping]:
    """The class mappings of two models. Raises InputError naming the model whose classes do not match, and how."""
    mappings = []
    for which, model in (("first", first), ("second", second)):
        try:
            mappings.append(reading(model, data))
        except InputError as error:
            raise InputError(f"the {which} model does not know the data's classes: {error}") from error
    return mappings[0], mappings[1]


def _are_numbers(names: Sequence[str], count: int) -> bool:
    return len(names) == count and list(names) == [str(index) for index in range(count)]


def _first_few(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(repr(name) for name in names[:5]) or "none") + more


def _grouping_note(data: Sequence[str], groups: Mapping[str, Sequence[int]]) -> str:
    """The remark for a report where 1000 classes are grouped into 16."""
    sizes = ", ".join(f"{name}: {len(groups[name])}" for name in data[:3]) + (", ..." if len(data) > 3 else "")
    return (
        "The data's classes are among the 16 of the cue conflicts (Geirhos 2019), so ImageNet's 1000 classes are "
        f"grouped into the 16, each with the mean probability of its group ({sizes}); the other classes are left out. "
        "Name folders by ImageNet's classes or wnids (tabby, n02123045) to evaluate among all 1000."
    )
