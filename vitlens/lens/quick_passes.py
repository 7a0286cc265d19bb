"""Forward passes of many images on a CPU: by oneDNN, and as many images at a time as fit the processor's cache.

Linear layers and convolutions are equal up to rounding. PyTorch computes linear layers in fp32 with MKL, slower on some
processors; convolutions and bf16 already use oneDNN. A GELU after a linear layer is fused with it at almost no cost.
Gradients are with respect to the inputs alone: a layer whose weights require a gradient is left to PyTorch. Larger
batches move every activation through the main memory: the bundled models take 1.8 times as long for 512 images at once
as for 64 at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.lens.trace import trace
from vitlens.models.anatomy import is_known_mlp
from vitlens.models.hooks import Forward, overridden
from vitlens.models.model import Model

_CACHE: Final = 12 << 20  # bytes of the widest activation of one forward pass that fit a processor's cache
_PRODUCT: Final = "_linear_pointwise"  # the operator that torch.compile uses for linear layers


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
    """Inside, a CNN's weights on a CPU, and so its maps, are in channels-last format; restored on exit.

    oneDNN is then faster forward and backward. A model whose only convolution is a patch embedding is left unchanged.
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
def quick_layers(model: Model) -> Iterator[None]:
    """`quick_linear`, with the first linear layer and the exact GELU of our and timm's MLPs as one call.

    An MLP with hooks between the two is left unchanged.
    """
    with quick_linear(model.device), ExitStack() as stack:
        for module in model.modules() if _has_onednn(model.device) else ():
            if _can_fuse(module):
                stack.enter_context(overridden(module, _with_gelu(module)))
        yield


def _has_onednn(device: torch.device) -> bool:
    operators = torch.ops.mkldnn
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(operators, _PRODUCT)


class _OneDNN(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute linear layers with oneDNN where it can; pass every other call through."""
        if func is F.linear and not kwargs and len(args) == 3 and _fits(*args):
            return _differentiable_product(*args) if torch.is_grad_enabled() else _product(*args, "none")
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
        """The product with the transposed weights."""
        (weight,) = ctx.saved_tensors
        return _product(gradients[0], weight.t().contiguous(), None, "none"), None, None


def _differentiable_product(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """With two axes, as autograd forbids in-place changes (some models make them) of a view that a Function returns."""
    result: Tensor = _Linear.apply(tokens.flatten(0, -2), weight, bias)
    return result.unflatten(0, tokens.shape[:-1]) if tokens.dim() != 2 else result


def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.contiguous(), weight, bias, then, [], "none")
    return result


def _fits(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN computes this layer: fp32 throughout, and no gradient of a weight is required."""
    plain = all(tensor is None or tensor.dtype == torch.float32 for tensor in (tokens, weight, bias))
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    graph = not torch.is_grad_enabled() or (frozen and tokens.requires_grad)
    return plain and graph and tokens.dim() > 1 and tokens.numel() > 0 and not torch.is_autocast_enabled("cpu")


def _can_fuse(module: nn.Module) -> bool:
    """Whether a module is a known MLP with an exact GELU and no hooks before its second linear layer."""
    if not is_known_mlp(module):
        return False
    children = dict(module.named_children())
    gelu = children.get("act", children.get("activation"))
    exact = isinstance(gelu, nn.GELU) and gelu.approximate == "none" and isinstance(children["fc1"], nn.Linear)
    return exact and not any(
        child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child)
        for name, child in children.items()
        if name != "fc2"
    )


def _with_gelu(module: Any) -> Callable[[Forward], Forward]:
    """The MLP's forward with its GELU fused into the first product; its own forward where oneDNN cannot compute it."""
    first = module.fc1

    def wrap(forward: Forward) -> Forward:
        def fused(tokens: Tensor) -> Any:
            if module.training or torch.is_grad_enabled() or not _fits(tokens, first.weight, first.bias):
                return forward(tokens)
            return module.fc2(_product(tokens, first.weight, first.bias, "gelu"))

        return fused

    return wrap


@contextmanager
def quick_passes(model: Model) -> Iterator[None]:
    """Inside, forward passes without gradients of a model on a CPU are computed a few images at a time, by oneDNN.

    A model that is observed (by a hook, or a replaced forward of one of its modules) still gets each batch at once.
    """
    if model.device.type != "cpu":
        yield
        return
    size, before = quick_batch_size(model), _replaced(model)
    with quick_layers(model), quick_convolutions(model):
        own = _replaced(model) - before | {model}

        def in_parts(forward: Forward) -> Forward:
            def run(images: Tensor) -> Any:
                hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
                observed = hooked or not _replaced(model) <= own
                if torch.is_grad_enabled() or len(images) <= size or observed:
                    return forward(images)
                return torch.cat([forward(part) for part in images.split(size)])

            return run

        with overridden(model, in_parts):
            yield


def quick_batch_size(model: Model) -> int:
    """How many images fit the processor's cache, by the widest activation of one image; at least 1."""
    leaves = {name for name, module in model.module.named_modules() if not any(module.children())}
    widest = max((call.bytes for call in trace(model, 1).calls if call.module in leaves), default=1)
    return max(1, _CACHE // max(1, widest))


def _replaced(model: Model) -> set[nn.Module]:
    return {module for module in model.modules() if "forward" in vars(module)}
