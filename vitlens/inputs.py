"""Decorators of public functions, which convert images, labels and targets from every form."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from vitlens.classes import class_targets, label_columns
from vitlens.data.catalogue import read_split
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.models.memo import holding
from vitlens.models.model import Model, require_model
from vitlens.pixels import AnyImages, Parts, Streamed, as_parts, require_images

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_images(function: Function) -> Function:
    """Decorate a public function of (model, images, ...) to take them in every form.

    Callers give images as tensors, files, folders, PIL images, uint8 arrays or a Split
    (data/catalogue.py). The caller's images are not changed. Other threads that use the model wait.

    The decorated function gets:
    - images: it reads them by `as_images`, as one tensor in [0, 1], clamped and of the model's
      pixel_dtype, or part by part by `as_parts`. `groups_of` returns the groups of a Split;
    - labels: by default those of the Split or the class folders;
    - targets: class indices (batch,), or None for the predicted classes. If the default of the
      parameter is None, as in an attack, None means no targets (untargeted), and "predicted" and
      "label" are refused.

    Raises DataError as `read_split` and `require_images` do. Raises InputError for anything but a
    Model, for options without their names, and for wrong targets. Raises UnknownNameError for an
    option or a class that does not exist.
    """
    signature = inspect.signature(function)
    targets_parameter = signature.parameters.get("targets")
    takes_labels = "labels" in signature.parameters

    @wraps(function)
    def checked(model: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        require_model(model, images)
        _require_options(function, signature, args, kwargs)
        # The caller may be in inference mode, in which nothing has a gradient. Other threads wait
        # while this one holds the model.
        with torch.inference_mode(mode=False), holding(model):
            images, split = _read(model, images)
            if targets_parameter is None and (split is None or not takes_labels):
                return function(model, images, *args, **kwargs)
            bound = signature.bind(model, images, *args, **kwargs)
            arguments = bound.arguments
            if takes_labels and arguments.get("labels") is None:
                arguments["labels"] = None  # also where the caller left it out
                if split is not None and split.labels is not None:
                    arguments["labels"] = label_columns(model.classes, split)
            if targets_parameter is not None:
                targets = arguments.get("targets", targets_parameter.default)
                if targets is not None:
                    # those of a targeted attack: "predicted" and "label" are refused
                    only_classes = targets_parameter.default is None
                    targets = class_targets(
                        targets, model, len(images), split=split, only_classes=only_classes
                    )
                arguments["targets"] = targets
            return function(*bound.args, **bound.kwargs)

    return cast(Function, checked)


def takes_splits(function: Function) -> Function:
    """Decorate a public function of (model, ...) with Splits among its parameters.

    `images` and `second_images` may also have every other form (data/catalogue.py). `labels` (n,),
    class indices of the model, belong to tensors, or replace the labels of a Split.

    Raises DataError for values that are no images. Also raises it for anything but a Split as the
    value of a parameter that is annotated as Split.
    """
    signature = inspect.signature(function)
    split_parameters = []  # those that take nothing but a Split
    for name, parameter in signature.parameters.items():
        if parameter.annotation in (Split, Split | None):
            split_parameters.append(name)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if args:  # first of all: a wrong model is a better reason than a missing argument
            require_model(*args[:2])
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        model = next(iter(arguments.values()))  # the first parameter
        require_model(model)
        for name in split_parameters:
            _require_split(name, arguments.get(name))
        for name in ("images", "second_images"):
            images = arguments.get(name)
            if images is None:
                continue
            reader = arguments["second"] if name == "second_images" else model
            split = read_split(images, reader.preprocessing)
            arguments[name] = with_labels(split, arguments.get("labels"), model)
        return function(*bound.args, **bound.kwargs)

    return cast(Function, checked)


def parts_of(model: Model, images: AnyImages) -> Parts:
    """Return images in any form as parts in [0, 1], of the model's pixel_dtype.

    Raises as `takes_images` does.
    """
    parts, _ = _read(model, images)
    return as_parts(parts)


def with_labels(split: Split, labels: Tensor | None, model: Model) -> Split:
    """Return the split with these labels, class indices of the model; None changes nothing.

    Raises DataError for wrong labels, and UnsupportedError for a model without classes.
    """
    if labels is None:
        return split
    model.require_classifier()
    indices = torch.as_tensor(labels).cpu().long()
    is_outside = (indices < 0) | (indices >= len(model.classes))
    if indices.shape != (len(split),) or bool(is_outside.any()):
        limits = f" from {int(indices.min())} to {int(indices.max())}" if indices.numel() else ""
        raise DataError(
            f"expected labels ({len(split)},) from 0 to {len(model.classes) - 1}, found "
            f"{tuple(indices.shape)}{limits}"
        )
    return replace(split, labels=indices, classes=model.classes)


def _require_options(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise UnknownNameError for an unknown option, InputError for options without their names.

    args: the positional arguments after the model and the images.
    kwargs: the arguments by name.
    """
    names = []
    positional = []
    takes_more = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_more = True
            continue
        names.append(name)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(name)
    for name in kwargs:
        if name not in names and not takes_more:
            raise UnknownNameError(f"option of {function.__name__}", name, names)
    count = len(args) + 2
    if count > len(positional):
        options = ", ".join(f"{name}=" for name in names[len(positional) :])
        raise InputError(
            f"expected {function.__name__}({', '.join(positional)}) and options by name, found "
            f"{count} arguments without a name; give the last as {options}"
        )


def _require_split(name: str, value: object) -> None:
    """Raise DataError for an argument that is neither None nor a Split."""
    if value is not None and not isinstance(value, Split):
        raise DataError(
            f"expected a Split of images and labels for {name}, found {type(value).__name__}; make "
            "one with vitlens.load_data(DATA, part='train')"
        )


def _read(model: Model, images: Any) -> tuple[Tensor | Streamed, Split | None]:
    """Return images as a checked tensor without a Split, or as Streamed with their Split."""
    if isinstance(images, Tensor) and images.dtype != torch.uint8:
        return require_images(images, dtype=model.pixel_dtype), None
    if isinstance(images, Streamed):
        split = images.data
    else:
        split = read_split(images, model.preprocessing)
    return Streamed(split, model.pixel_dtype), split
