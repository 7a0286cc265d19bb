"""What a module returns for images: checked to be logits, one row an image."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import ModelError, VitlensError, lacks_memory
from vitlens.models.outputs import ReadOutput, first_output, two_classes

_PROBABILITIES: Final = {
    torch.softmax: "softmax", Tensor.softmax: "softmax", F.softmax: "softmax",
    torch.sigmoid: "sigmoid", Tensor.sigmoid: "sigmoid", F.sigmoid: "sigmoid",
}  # fmt: skip


def output_form(module: nn.Module, images: Tensor) -> tuple[ReadOutput, int]:
    """How to read logits from what a module returns for normalised images, and their number.

    Raises ModelError for a module that fails, changes its input, or returns anything but one row of logits an image.
    """
    name, given = type(module).__name__, images.clone()
    mode = _LastProbabilities()
    try:
        with evaluating(module), torch.no_grad(), mode:
            output = module(images)
    except VitlensError:
        raise
    except Exception as error:  # a user's forward may raise anything
        if lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ModelError(
            f"expected {name} to take normalised images {tuple(images.shape)}, found that it raises "
            f"{type(error).__name__}: {reason}; check image_size="
        ) from error
    if not torch.equal(images, given):
        raise ModelError(
            f"expected {name} to leave its input unchanged, found it changed in place; clone it in forward"
        )
    try:
        logits = first_output(output)
    except TypeError as error:
        raise ModelError(f"{error}; wrap a module whose forward returns the logits of {name}") from error
    if logits.dim() != 2 or len(logits) != len(images) or not logits.is_floating_point():
        raise ModelError(
            f"expected logits ({len(images)}, classes) from {name}, found {str(logits.dtype).removeprefix('torch.')} "
            f"of shape {tuple(logits.shape)}; wrap a module whose forward pools and classifies"
        )
    if mode.result is not None and mode.result.shape == logits.shape and torch.equal(mode.result, logits):
        several = " (independent labels are not supported: one label an image)" if mode.name == "sigmoid" else ""
        raise ModelError(
            f"expected logits from {name}, found probabilities, as its last step is a {mode.name}{several}; drop it"
        )
    return (two_classes, 2) if logits.shape[1] == 1 else (first_output, logits.shape[1])


class _LastProbabilities(TorchFunctionMode):
    """Keeps the last result of a softmax or sigmoid."""

    name = ""
    result: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Keep results of these two; compute every call as it is."""
        result = func(*args, **(kwargs or {}))
        if func in _PROBABILITIES:
            self.name, self.result = _PROBABILITIES[func], result
        return result
