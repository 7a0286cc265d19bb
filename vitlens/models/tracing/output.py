"""What a module returns for images: checked to be logits, one row an image."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import ModelError, VitlensError, lacks_memory
from vitlens.models.outputs import ReadOutput, first_output, two_classes

_TOLERANCE: Final = 1e-3  # of the largest logit
_RANDOM: Final = "pass training=self.training to F.dropout, and draw no random numbers in forward"
_MIXED: Final = "normalise and pool within each image (a batch norm needs its running statistics)"
_PROBABILITIES: Final = {
    torch.softmax: "softmax", Tensor.softmax: "softmax", F.softmax: "softmax",
    torch.sigmoid: "sigmoid", Tensor.sigmoid: "sigmoid", F.sigmoid: "sigmoid",
}  # fmt: skip


def output_form(module: nn.Module, images: Tensor) -> tuple[ReadOutput, int]:
    """How to read logits from what a module returns for two normalised images, and their number.

    Raises ModelError for a module that fails, changes its input or its buffers, returns anything but one row of logits
    an image, or whose logits are others in a second pass, or for an image alone.
    """
    name, given = type(module).__name__, images.clone()
    mode = _LastProbabilities()
    with _buffers_kept(module), evaluating(module), torch.no_grad():
        with mode:
            output = _returned(module, images)
        if not torch.equal(images, given):
            raise ModelError(
                f"expected {name} to leave its input unchanged, found it changed in place; clone it in forward"
            )
        logits = _logits(module, output, images)
        again = _logits(module, _returned(module, images), images)
        alone = _logits(module, _returned(module, images[:1]), images[:1])
    if mode.result is not None and mode.result.shape == logits.shape and torch.equal(mode.result, logits):
        several = " (independent labels are not supported: one label an image)" if mode.name == "sigmoid" else ""
        raise ModelError(
            f"expected logits from {name}, found probabilities, as its last step is a {mode.name}{several}; drop it"
        )
    _require_equal(logits, again, f"equal logits of {name} in two passes in evaluation mode", _RANDOM)
    _require_equal(logits[:1], alone, f"logits of {name} for an image that do not depend on its batch", _MIXED)
    return (two_classes, 2) if logits.shape[1] == 1 else (first_output, logits.shape[1])


def _returned(module: nn.Module, images: Tensor) -> Any:
    """What the module returns. Raises ModelError where it fails, for one image too."""
    try:
        return module(images)
    except VitlensError:
        raise
    except Exception as error:  # a user's forward may raise anything
        if lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:200]
        advice = "check image_size=" if len(images) > 1 else "a batch of two is taken"
        raise ModelError(
            f"expected {type(module).__name__} to take normalised images {tuple(images.shape)}, found that it raises "
            f"{type(error).__name__}: {reason}; {advice}"
        ) from error


def _logits(module: nn.Module, output: Any, images: Tensor) -> Tensor:
    """The logits in what the module returned for these images. Raises ModelError where there are none."""
    name = type(module).__name__
    try:
        logits = first_output(output)
    except TypeError as error:
        raise ModelError(f"{error}; wrap a module whose forward returns the logits of {name}") from error
    if logits.dim() == 2 and len(logits) == len(images) and logits.is_floating_point():
        return logits
    squeezed = "squeeze the axes by name, not that of the batch"
    raise ModelError(
        f"expected logits ({len(images)}, classes) from {name}, found {str(logits.dtype).removeprefix('torch.')} "
        f"of shape {tuple(logits.shape)}; "
        + ("wrap a module whose forward pools and classifies" if len(images) > 1 else squeezed)
    )


def _require_equal(one: Tensor, other: Tensor, what: str, advice: str) -> None:
    """Raise ModelError for logits that differ by more than rounding."""
    if one.is_meta:
        return
    tolerance = max(_TOLERANCE, 16 * torch.finfo(one.dtype).eps)
    difference = (one.float() - other.float()).abs().max().item()
    if difference > tolerance * max(1.0, one.float().abs().max().item()):
        raise ModelError(f"expected {what}, found a difference of {difference:.1e}; {advice}")


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Raise ModelError on exit where the module's buffers have changed, and restore them."""
    before = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    changed: list[str] = []
    try:
        yield
    finally:
        now = dict(module.named_buffers())
        for name, (buffer, value) in before.items():
            same = now.get(name) is buffer and (buffer.is_meta or torch.equal(buffer, value))
            if not same and not bool((buffer != buffer).any()):  # NaN is not equal to itself
                changed.append(name)
            if not same:
                owner, _, own = name.rpartition(".")
                buffer.copy_(value)
                module.get_submodule(owner)._buffers[own] = buffer
    if changed:
        raise ModelError(
            f"expected {type(module).__name__} to leave its buffers unchanged in evaluation mode, found {changed[0]} "
            "changed in a forward pass; update it where self.training alone"
        )


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
