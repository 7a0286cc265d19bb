"""Which device and which precision: what the user asked for, against what is there."""

import platform
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.errors import InputError, UnknownNameError
from vitlens.names import PRECISIONS


def resolve_device(name: str = "auto") -> torch.device:
    """The device for a name: auto (cuda, then mps, then cpu), cpu, cuda, cuda:N or mps.

    Raises InputError when the name is none of these or the device is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name):
        raise InputError(f"expected --device auto, cpu, cuda, cuda:N or mps, found {name!r}")
    kind, _, index = name.partition(":")
    if kind == "cuda" and (not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count()):
        raise InputError(
            f"expected a CUDA device for --device {name}, found {torch.cuda.device_count()}; try --device cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InputError("expected Apple's mps for --device mps, found none; try --device cpu")
    return torch.device(name)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Mixed precision for a device: bf16, fp32, or auto (bf16 on a CUDA device that has it, else fp32).

    On a CPU attention keeps fp32 where a gradient is wanted.
    """
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "fp32":
        return nullcontext()
    mixed = torch.autocast(device.type, dtype=torch.bfloat16)
    return _with_wide_attention(mixed) if device.type == "cpu" else mixed


@contextmanager
def _with_wide_attention(mixed: AbstractContextManager[object]) -> Iterator[None]:
    with mixed, _WideAttention():
        yield


class _WideAttention(TorchFunctionMode):
    """On a CPU, attention whose gradient is wanted in fp32: torch's fused kernel is slow backwards in bf16 there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand on every call; that of attention with its inputs in fp32."""
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **named)
        with torch.autocast("cpu", enabled=False):
            return func(*map(_wide, args), **{name: _wide(value) for name, value in named.items()})


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """A module in evaluation mode; every submodule's own mode comes back on exit."""
    modes = {name: part.training for name, part in module.named_modules()}
    module.eval()
    try:
        yield
    finally:
        for name, part in module.named_modules():
            part.training = modes.get(name, part.training)


def device_name(device: torch.device) -> str:
    """What the hardware calls itself ("NVIDIA H100 80GB HBM3"); the architecture where it does not say."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
