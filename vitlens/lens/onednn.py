"""Layers by oneDNN while a context lasts: the same numbers to rounding, faster on many processors.

PyTorch gives linear layers in fp32 to MKL, which on some processors is slower; convolutions and bf16 it gives to oneDNN
anyway. A GELU behind a linear layer is computed with it at almost no cost. Gradients are those with respect to the
inputs alone: a layer whose weights want one is left to PyTorch.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.lens.hooks import overridden
from vitlens.models.vit import MLP

_PRODUCT = "_linear_pointwise"  # what torch.compile puts in a linear layer's place
_TIMM_MLP = {"fc1", "act", "drop1", "norm", "fc2", "drop2"}


@contextmanager
def quick_linear(device: torch.device) -> Iterator[None]:
    """Inside, linear layers in fp32 on this device are oneDNN's, where it is a CPU and this torch has them.

    Without gradients, or with gradients of the inputs through frozen weights.
    """
    if not _has_onednn(device):
        yield
        return
    with _OneDNN():
        yield


@contextmanager
def quick_convolutions(model: nn.Module) -> Iterator[None]:
    """Inside, a CNN's weights on a CPU lie channels last, and so does what they compute; the old ones are back on exit.

    oneDNN is then faster forward and backward. A model whose convolutions only cut patches is left alone.
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


@contextmanager
def quick_mlps(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the first linear layer and the exact GELU of our and timm's MLPs are one call, where quick_linear works.

    An MLP with hooks between the two is left alone.
    """
    with ExitStack() as stack:
        if _has_onednn(device):
            for module in model.modules():
                if _is_mlp(module):
                    stack.enter_context(overridden(module, _with_gelu(module)))
        yield


def _has_onednn(device: torch.device) -> bool:
    return (
        device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, _PRODUCT)
    )  # fmt: skip


class _OneDNN(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass on every call but that of a linear layer which oneDNN can compute."""
        if func is F.linear and not kwargs and len(args) == 3 and _fits(*args):
            return _Linear.apply(*args) if torch.is_grad_enabled() else _product(*args, "none")
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """tokens -> tokens weightᵀ + bias, and its gradient with respect to the tokens alone."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """oneDNN's product."""
        ctx.save_for_backward(weight)
        return _product(tokens, weight, bias, "none")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The same, with the weights transposed."""
        (weight,) = ctx.saved_tensors
        return _product(gradients[0], weight.t().contiguous(), None, "none"), None, None


def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.contiguous(), weight, bias, then, [], "none")
    return result


def _fits(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN computes this layer: fp32 throughout, and no gradient of a weight is asked for."""
    plain = all(one is None or one.dtype == torch.float32 for one in (tokens, weight, bias))
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    graph = not torch.is_grad_enabled() or (frozen and tokens.requires_grad)
    return plain and graph and tokens.dim() > 1 and tokens.numel() > 0 and not torch.is_autocast_enabled("cpu")


def _is_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    timm = children.keys() == _TIMM_MLP and type(module).__name__ == "Mlp" and _is_identity(children["norm"])
    if not timm and type(module) is not MLP:
        return False
    middle = [child for name, child in children.items() if name != "fc2"]
    gelu = children.get("act", children.get("activation"))
    exact = isinstance(gelu, nn.GELU) and gelu.approximate == "none"
    return exact and isinstance(children["fc1"], nn.Linear) and not any(map(_has_hooks, middle))


def _is_identity(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _with_gelu(module: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The MLP's forward with its GELU in the first product; its own forward where that does not fit."""
    first = module.fc1

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def fused(tokens: Tensor) -> Any:
            if module.training or torch.is_grad_enabled() or not _fits(tokens, first.weight, first.bias):
                return forward(tokens)
            return module.fc2(_product(tokens, first.weight, first.bias, "gelu"))

        return fused

    return wrap
