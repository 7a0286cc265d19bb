"""Layers by oneDNN in passes with gradients: forward, and back to the pixels.

Linear layers: lens/onednn.py does it where no gradient is wanted. Here the backward pass is a linear layer too, of the
transposed weights, because nobody asks for the gradients of the weights themselves. Convolutions: torch gives them to
oneDNN anyway, which is quicker both ways with the channels of a pixel side by side.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_PRODUCT = "_linear_pointwise"  # what torch.compile puts in a linear layer's place


@contextmanager
def quick_gradients(device: torch.device) -> Iterator[None]:
    """Inside, linear layers in fp32 with frozen weights are oneDNN's, where the device is a CPU and torch has them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, _PRODUCT):
        yield
        return
    with _OneDNN():
        yield


@contextmanager
def quick_convolutions(model: nn.Module) -> Iterator[None]:
    """Inside, a CNN's weights on a CPU lie channels last, and so does what they make; the old ones are back on exit.

    A model whose convolutions only cut the image into patches is left alone.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.weight.device.type == "cpu"]
    slides = any(max(layer.kernel_size) > 1 and layer.kernel_size != layer.stride for layer in layers)
    held = [(layer.weight, layer.weight.data) for layer in layers] if slides else []
    try:
        for weight, values in held:
            weight.data = values.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for weight, values in held:
            weight.data = values


class _OneDNN(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand on every call but that of a linear layer which oneDNN can take."""
        if func is F.linear and not kwargs and len(args) == 3 and _fits(*args):
            return _Linear.apply(*args)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """tokens -> tokens weightᵀ + bias, and its gradient with respect to the tokens alone."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """oneDNN's product."""
        ctx.save_for_backward(weight)
        return _product(tokens, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The same, with the weights transposed."""
        (weight,) = ctx.saved_tensors
        return _product(gradients[0], weight.t().contiguous(), None), None, None


def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.contiguous(), weight, bias, "none", [], "")
    return found


def _fits(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    parts = tokens, weight, bias
    plain = all(one is None or one.dtype == torch.float32 for one in parts) and not torch.is_autocast_enabled("cpu")
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return plain and frozen and tokens.requires_grad and tokens.dim() > 1 and tokens.numel() > 0
