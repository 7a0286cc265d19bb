"""The tensors in what a module returns: a tensor, or tuples, lists and dicts of tensors."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(output: Any) -> tuple[Tensor, ...]:
    """Return every tensor of an output, in order."""
    return tuple(_tensors(output))


def with_tensor(output: Any, index: int, tensor: Tensor) -> Any:
    """Return the output with another tensor at an index of `tensors_in`.

    The output itself is not changed.
    """
    tensors = list(_tensors(output))
    tensors[index] = tensor
    return _rebuilt(output, iter(tensors))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)


def _rebuilt(output: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(output, Tensor):
        return next(tensors)
    if isinstance(output, Mapping):
        # the outputs of transformers set their attributes by their keys
        changed: Any = copy.copy(output)
        for key, value in output.items():
            changed[key] = _rebuilt(value, tensors)
        return changed
    if isinstance(output, tuple | list):
        items = [_rebuilt(value, tensors) for value in output]
        if isinstance(output, tuple) and hasattr(output, "_fields"):
            return type(output)(*items)
        return type(output)(items)
    return output
