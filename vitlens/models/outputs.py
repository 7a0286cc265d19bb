"""From what a module returns to logits (batch, classes)."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

ReadOutput = Callable[[Any], Tensor]

_NAMES: Final = ("logits", "image_embeds", "pooler_output")  # of transformers' outputs, in order of preference


def mean_of_pair(output: Any) -> Tensor:
    """A tensor, or the mean of the pair that a distilled model returns in training mode."""
    return output if isinstance(output, Tensor) else torch.stack(tuple(output)).mean(0)


def first_output(output: Any) -> Tensor:
    """A tensor, the first of several, or an object's `logits`. Raises TypeError for anything else."""
    for name in _NAMES:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, Tensor):
        return output
    raise TypeError(
        f"expected a tensor, a tuple that begins with one, or an object with .logits, found {_kind(output)}"
    )


def two_classes(output: Any) -> Tensor:
    """One logit z as two, (0, z): softmax gives sigmoid(z) for the second class."""
    logit = first_output(output)
    return torch.cat([torch.zeros_like(logit), logit], dim=1)


def _kind(output: Any) -> str:
    return f"{type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list | Mapping) else "")
