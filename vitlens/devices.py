"""Checks requested devices and precisions against the available ones."""

import platform
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.errors import InputError, UnknownNameError, argument, nearest
from vitlens.names import PRECISIONS
from vitlens.turns import turn

_NAMES = ("auto", "cpu", "cuda", "mps")
_SYNONYMS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",
    "hip": "cuda",
    "metal": "mps",
    "apple": "mps",
}
# on a CPU in bf16, attention is computed as matrix products up to so many keys per head dimension
_MOST_KEYS_PER_DIM = 5


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device for a name: auto (cuda, then mps, then cpu), cpu, cuda, cuda:N or mps.

    Raises InputError for another name, and for a device that is not available.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name):
        message = f"expected {argument('device')} auto, cpu, cuda, cuda:N or mps, found {name!r}"
        suggestion = _suggestion(name)
        if suggestion:
            message += f"; did you mean {suggestion!r}?"
        raise InputError(message)
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or int(index or 0) >= count:
            raise InputError(
                f"expected a CUDA device for {argument('device', name)}, found {count}; try "
                f"{argument('device', 'cpu')}"
            )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InputError(
            f"expected Apple's mps for {argument('device', 'mps')}, found none; try "
            f"{argument('device', 'cpu')}"
        )
    return torch.device(name)


def as_device(device: torch.device | str) -> torch.device:
    """Return the device of a Python caller's argument.

    device: a torch device, "meta" (shapes without numbers), or a name for `resolve_device`.

    Raises InputError.
    """
    if isinstance(device, torch.device):
        if device.type == "mps":
            resolve_device("mps")  # the device of a tensor is mps:0, which is no name
        elif device.type == "cuda":
            resolve_device(str(device))
        return device
    if device == "meta":
        return torch.device("meta")
    return resolve_device(str(device))


def _suggestion(name: str) -> str:
    """Return the device that a misspelled name may stand for, "" for none."""
    # a word and an index, such as "gpu:0", "gpu0" or "1"; every text matches, as both may be ""
    match = re.fullmatch(r"(.*?):?([0-9]*)", name.strip().lower(), re.DOTALL)
    word, digits = match.groups()  # type: ignore[union-attr]
    if word in _SYNONYMS or (digits and not word):
        word = _SYNONYMS.get(word, "cuda")
    elif word not in _NAMES:
        word = next(iter(nearest(word, _NAMES)), "")
    if word == "cuda" and digits:
        return f"{word}:{digits}"
    return word


def multiplies_bf16(device: torch.device) -> bool:
    """Return True if a device has units that multiply matrices in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        # an older torch lacks these functions; `bool` stands in for them, as bool() is False
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
        has_avx = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
        return bool(has_amx() or has_avx())
    return False


def in_bf16(device: torch.device, precision: str) -> bool:
    """Return True if a precision is bf16 on a device; auto: on a CUDA device that supports it."""
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bf16"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return a context of mixed precision if `in_bf16`, else of fp32.

    On a CUDA device, fp32 includes convolutions, which cuDNN computes in TF32 by default. On a CPU
    in bf16, attention that requires a gradient is computed as matrix products, or in fp32.
    """
    if in_bf16(device, precision):
        return _bf16(device)
    if device.type == "cuda":
        return _without_tf32()
    return nullcontext()


@contextmanager
def _bf16(device: torch.device) -> Iterator[None]:
    attention = _AttentionWithGradient() if device.type == "cpu" else nullcontext()
    with torch.autocast(device.type, dtype=torch.bfloat16), attention:
        yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    previous = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = previous


class _AttentionWithGradient(TorchFunctionMode):
    """A mode for attention with gradients on a CPU, where torch's fused kernel is slow in bf16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute attention as products in bf16 if these are fast, else by the kernel in fp32.

        Other calls are passed on.
        """
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            if not _has_options(args, kwargs) and multiplies_bf16(args[0].device):
                query, key, value = (tensor.bfloat16() for tensor in args)
                # Products keep the weights for the backward pass. They are faster than the kernel
                # only if the weights are small.
                same_batch = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
                keys = key.shape[-2]
                head_dim = query.shape[-1]
                if same_batch and keys <= _MOST_KEYS_PER_DIM * head_dim:
                    scale = kwargs.get("scale")
                    if scale is None:
                        scale = head_dim**-0.5
                    return ((query * scale) @ key.transpose(-2, -1)).softmax(-1) @ value
            wide_args = [_widen(value) for value in args]
            wide_kwargs = {name: _widen(value) for name, value in kwargs.items()}
            return func(*wide_args, **wide_kwargs)


def _has_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for attention with more than query, key, value and scale."""
    if len(args) != 3:
        return True
    options = [value for name, value in kwargs.items() if name != "scale"]
    return any(isinstance(value, Tensor) or value for value in options)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode while other threads wait for the module; restore all modes on exit."""
    with turn(module):
        modes = {name: submodule.training for name, submodule in module.named_modules()}
        module.eval()
        try:
            yield
        finally:
            for name, submodule in module.named_modules():
                submodule.training = modes.get(name, submodule.training)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, as many small passes wait longer for threads than they compute."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def device_name(device: torch.device) -> str:
    """Return the name of the hardware ("NVIDIA H100 80GB HBM3"), else its architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
