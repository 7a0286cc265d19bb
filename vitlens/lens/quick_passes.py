"""Forward passes of many images on a CPU: by oneDNN, and as many images at a time as fit its cache.

Linear layers and convolutions are equal up to rounding. PyTorch computes linear layers in fp32 with
MKL, which is slower on some processors; convolutions and bf16 already use oneDNN. A GELU after a
linear layer is fused with it at almost no cost. Gradients are only with respect to the inputs: a
layer with weights that require a gradient is left to PyTorch. Larger batches move every activation
through the main memory: the bundled models take 1.8 times as long for 512 images at once as for 64
at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from vitlens.lens.trace import trace
from vitlens.models.hooks import Forward, has_global_hooks, is_changed, overridden
from vitlens.models.known_modules import is_known_mlp
from vitlens.models.memo import holding
from vitlens.models.model import Model
from vitlens.turns import turn

# bytes of the widest activation of one forward pass that fit a processor's cache
_CACHE_BYTES: Final = 12 << 20
_PRODUCT: Final = "_linear_pointwise"  # the operator that torch.compile uses for linear layers


@contextmanager
def quick_linear(device: torch.device) -> Iterator[None]:
    """Compute fp32 linear layers by oneDNN on a CPU, if this torch has it.

    It does so without gradients, or with gradients of the inputs through frozen weights. Nothing
    changes under a function mode of another origin, which must see every linear layer.
    """
    if not _has_onednn(device) or _has_other_mode():
        yield
        return
    with _OneDNN():
        yield


@contextmanager
def quick_convolutions(model: nn.Module) -> Iterator[None]:
    """Put a CNN's weights on a CPU in channels-last format, and so its maps; restored on exit.

    oneDNN is then faster forward and backward. A model whose only convolution is a patch embedding
    is left unchanged.
    """
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    layers = [layer for layer in convolutions if layer.weight.device.type == "cpu"]
    # a patch embedding has its stride as kernel size, and oneDNN gains nothing for 1x1 kernels
    gains = any(
        max(layer.kernel_size) > 1 and layer.kernel_size != layer.stride for layer in layers
    )
    if not gains:
        layers = []
    original = [(layer.weight, layer.weight.data) for layer in layers]
    with turn(model):
        try:
            for weight, values in original:
                weight.data = values.contiguous(memory_format=torch.channels_last)
            yield
        finally:
            for weight, values in original:
                weight.data = values


@contextmanager
def quick_layers(model: Model) -> Iterator[None]:
    """Apply `quick_linear`, and fuse the exact GELU of our and timm's MLPs with its linear layer.

    An MLP is left unchanged if an intervention or other code changes it, or if a hook is between
    the two layers.
    """
    with turn(model), quick_linear(model.device), ExitStack() as stack:
        if _has_onednn(model.device) and not _has_other_mode():
            for module in model.modules():
                if "forward" not in vars(module) and is_known_mlp(module):
                    stack.enter_context(overridden(module, _with_gelu(module), equal=True))
        yield


def _has_other_mode() -> bool:
    """Return True if a mode that is neither torch's nor ours intercepts torch's functions."""
    modes = map(type, _get_current_function_mode_stack())
    return not all(mode.__module__.startswith(("vitlens.", "torch.")) for mode in modes)


def _has_onednn(device: torch.device) -> bool:
    operators = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(operators, _PRODUCT)
    )


class _OneDNN(TorchFunctionMode):
    """A mode that computes linear layers by oneDNN."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute linear layers with oneDNN where it can; pass every other call through."""
        is_plain_linear = func is F.linear and not kwargs and len(args) == 3
        if is_plain_linear and _fits(*args):
            tokens, weight, bias = args
            if torch.is_grad_enabled():
                return _differentiable_product(tokens, weight, bias)
            return _product(tokens, weight, bias, "none")
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """tokens -> tokens weightᵀ + bias, and its gradient with respect to the tokens only."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return oneDNN's product."""
        ctx.save_for_backward(weight)
        return _product(tokens, weight, bias, "none")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the product with the transposed weights."""
        (weight,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative, which oneDNN's product has not
            return gradients[0] @ weight, None, None
        token_gradient = _product(gradients[0], weight.t().contiguous(), None, "none")
        return token_gradient, None, None


def _differentiable_product(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Autograd forbids in-place changes of a view that a Function returns, and some models make
    # them. With two axes, the product is no view.
    result: Tensor = _Linear.apply(tokens.flatten(0, -2), weight, bias)
    if tokens.dim() != 2:
        result = result.unflatten(0, tokens.shape[:-1])
    return result


def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return oneDNN's product tokens weightᵀ + bias.

    activation: the activation that is fused with it, "none" or "gelu".
    """
    scalars: list[float] = []  # the exact GELU has no parameters
    algorithm = "none"  # of the activation: "none" is the exact GELU
    operator = getattr(torch.ops.mkldnn, _PRODUCT)
    result: Tensor = operator(tokens.contiguous(), weight, bias, activation, scalars, algorithm)
    return result


def _fits(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if oneDNN can compute this layer.

    All tensors must be plain and in fp32, and no gradient of a weight may be needed.
    """
    if not _is_plain(tokens) or not _is_plain(weight) or (bias is not None and not _is_plain(bias)):
        return False
    if torch.is_grad_enabled():
        is_frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
        if not is_frozen or not tokens.requires_grad:
            return False
    return tokens.dim() > 1 and tokens.numel() > 0 and not torch.is_autocast_enabled("cpu")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and type(tensor) in (Tensor, nn.Parameter)


def _with_gelu(module: Any) -> Callable[[Forward], Forward]:
    """Return the MLP's forward with its GELU fused into the first product.

    The unfused forward runs where oneDNN cannot compute it, and while a skipped part has a hook or
    another forward.
    """
    first_layer = module.fc1
    # the parts that do not run: the first layer, the GELU and dropout
    skipped = [part for name, part in module.named_children() if name != "fc2"]

    def is_observed() -> bool:
        if has_global_hooks():
            return True
        return any(
            part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
            for part in skipped
        )

    def wrap(forward: Forward) -> Forward:
        def fused(tokens: Tensor) -> Any:
            if module.training or torch.is_grad_enabled() or is_observed():
                return forward(tokens)
            weight = first_layer.weight
            bias = first_layer.bias
            if not _fits(tokens, weight, bias):
                return forward(tokens)
            return module.fc2(_product(tokens, weight, bias, "gelu"))

        return fused

    return wrap


@contextmanager
def quick_passes(model: Model) -> Iterator[None]:
    """Compute gradient-free passes of a model on a CPU by oneDNN, a few images at a time.

    A model that is observed (by a hook, or a replaced forward of one of its modules) still gets
    each batch at once.
    """
    if model.device.type != "cpu":
        yield
        return
    with holding(model), quick_layers(model):
        size = quick_batch_size(model)

        def in_parts(forward: Forward) -> Forward:
            def run(images: Tensor) -> Any:
                if torch.is_grad_enabled() or len(images) <= size:
                    return forward(images)
                has_hook = any(
                    module._forward_hooks or module._forward_pre_hooks for module in model.modules()
                )
                if has_hook or is_changed(model):
                    return forward(images)
                return torch.cat([forward(part) for part in images.split(size)])

            return run

        with quick_convolutions(model), overridden(model, in_parts, equal=True):
            yield


def quick_batch_size(model: Model) -> int:
    """Return how many images, at least 1, fit the processor's cache.

    They are counted by the widest activation of one image.
    """
    leaves = {name for name, module in model.module.named_modules() if not any(module.children())}
    activation_sizes = [call.bytes for call in trace(model, 1).calls if call.module in leaves]
    widest = max(activation_sizes, default=1)
    return max(1, _CACHE_BYTES // max(1, widest))
