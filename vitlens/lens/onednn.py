"""Linear layers by oneDNN while a block lasts: the same numbers to rounding, sooner on many processors.

PyTorch gives linear layers in fp32 to MKL, which on some processors is slower; convolutions and bf16 it gives to oneDNN
anyway. A GELU behind a linear layer is computed with it, for next to nothing. For forward passes
without gradients alone.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.lens.inside import overridden
from vitlens.models.vit import MLP

_PRODUCT = "_linear_pointwise"  # what torch.compile puts in a linear layer's place
_TIMM_MLP = {"fc1", "act", "drop1", "norm", "fc2", "drop2"}


@contextmanager
def quick_linear(device: torch.device) -> Iterator[None]:
    """Inside, linear layers in fp32 on this device are oneDNN's, where it is a CPU and this torch has them."""
    if not _known(device):
        yield
        return
    with _OneDNN():
        yield


@contextmanager
def quick_mlps(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the first linear layer and the exact GELU of our and timm's MLPs are one call, where quick_linear works.

    Only where nobody listens between the two: an MLP with hooks inside is left alone.
    """
    with ExitStack() as stack:
        if _known(device):
            for module in model.modules():
                if _is_mlp(module):
                    stack.enter_context(overridden(module, _together(module)))
        yield


def _known(device: torch.device) -> bool:
    return (
        device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, _PRODUCT)
    )  # fmt: skip


class _OneDNN(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand on every call but that of a linear layer which oneDNN can take."""
        if func is F.linear and not kwargs and len(args) == 3 and _fits(*args):
            return _product(*args, "none")
        return func(*args, **(kwargs or {}))


def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.contiguous(), weight, bias, then, [], "none")
    return result


def _fits(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    plain = all(one is None or one.dtype == torch.float32 for one in (tokens, weight, bias))
    return plain and tokens.dim() > 1 and tokens.numel() > 0 and not torch.is_autocast_enabled("cpu") and (
        not torch.is_grad_enabled()
    )  # fmt: skip


def _is_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    timm = children.keys() == _TIMM_MLP and type(module).__name__ == "Mlp" and _is_nothing(children["norm"])
    if not timm and type(module) is not MLP:
        return False
    middle = [child for name, child in children.items() if name != "fc2"]
    gelu = children.get("act", children.get("activation"))
    exact = isinstance(gelu, nn.GELU) and gelu.approximate == "none"
    return exact and isinstance(children["fc1"], nn.Linear) and not any(map(_is_heard, middle))


def _is_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity)


def _is_heard(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _together(module: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The MLP's forward with its GELU inside the first product; its own wherever that cannot be."""
    first = module.fc1

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def fused(tokens: Tensor) -> Any:
            if module.training or not _fits(tokens, first.weight, first.bias):
                return forward(tokens)
            return module.fc2(_product(tokens, first.weight, first.bias, "gelu"))

        return fused

    return wrap
