"""Devices and precisions: the requested ones, checked against what is available."""

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
_CALLED = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",
    "hip": "cuda",
    "metal": "mps",
    "apple": "mps",
}
_KEYS = 5  # most keys per dimension of a head for attention as matrix products


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device for a name: auto (cuda, then mps, then cpu), cpu, cuda, cuda:N or mps.
    Raises InputError.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name):
        meant = _meant(name)
        raise InputError(
            f"expected {argument('device')} auto, cpu, cuda, cuda:N or mps, found {name!r}"
            f"{f'; did you mean {meant!r}?' if meant else ''}"
        )
    kind, _, index = name.partition(":")
    if kind == "cuda" and (
        not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count()
    ):
        raise InputError(
            f"expected a CUDA device for {argument('device', name)}, found "
            f"{torch.cuda.device_count()}; try {argument('device', 'cpu')}"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InputError(
            f"expected Apple's mps for {argument('device', 'mps')}, found none; try "
            f"{argument('device', 'cpu')}"
        )
    return torch.device(name)


def as_device(device: torch.device | str) -> torch.device:
    """Return the device that a Python caller gives: one of torch's, "meta" (shapes without
    numbers), or a name as above.

    Raises InputError.
    """
    if isinstance(device, torch.device) and device.type not in ("cuda", "mps"):
        return device
    if device == "meta":
        return torch.device("meta")
    return resolve_device(str(device))


def _meant(name: str) -> str:
    """Return the device that a misspelled name may stand for; "" for none."""
    word, digits = re.fullmatch(r"(.*?):?([0-9]*)", name.strip().lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    if word in _CALLED or (digits and not word):
        word = _CALLED.get(word, "cuda")
    elif word not in _NAMES:
        word = next(iter(nearest(word, _NAMES)), "")
    return f"{word}:{digits}" if word == "cuda" and digits else word


def multiplies_bf16(device: torch.device) -> bool:
    """Return True if a device has units that multiply matrices in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
        avx = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
        return bool(amx() or avx())
    return False


def in_bf16(device: torch.device, precision: str) -> bool:
    """Return True if a precision (bf16, fp32, or auto: bf16 on a CUDA device that has it) is bf16
    on a device.
    """
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bf16"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Mixed precision, where `in_bf16`, else fp32; on a CUDA device that is fp32 in convolutions,
    too, which cuDNN by default computes in TF32. On a CPU, attention that requires a gradient is
    computed as matrix products, or in fp32.
    """
    if in_bf16(device, precision):
        return _bf16(device)
    return _without_tf32() if device.type == "cuda" else nullcontext()


@contextmanager
def _bf16(device: torch.device) -> Iterator[None]:
    attention = _AttentionWithGradient() if device.type == "cpu" else nullcontext()
    with torch.autocast(device.type, dtype=torch.bfloat16), attention:
        yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class _AttentionWithGradient(TorchFunctionMode):
    """Attention with gradients on a CPU, where the backward pass of torch's fused kernel is slow in
    bf16.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute attention as products in bf16 where these are fast, else by the kernel in fp32;
        pass other calls.
        """
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **named)
        plain = len(args) == 3 and not any(
            isinstance(value, Tensor) or value for name, value in named.items() if name != "scale"
        )
        with torch.autocast("cpu", enabled=False):
            if plain and multiplies_bf16(args[0].device):
                query, key, value = (each.bfloat16() for each in args)
                # products are faster where the weights, which they keep for the backward pass, are
                # small
                alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
                if alike and key.shape[-2] <= _KEYS * query.shape[-1]:
                    scale = named.get("scale")
                    scale = query.shape[-1] ** -0.5 if scale is None else scale
                    return ((query * scale) @ key.transpose(-2, -1)).softmax(-1) @ value
            return func(*map(_wide, args), **{name: _wide(value) for name, value in named.items()})


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode and used by this thread alone; every submodule's
    mode is restored.
    """
    with turn(module):
        modes = {name: part.training for name, part in module.named_modules()}
        module.eval()
        try:
            yield
        finally:
            for name, part in module.named_modules():
                part.training = modes.get(name, part.training)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: many small passes wait longer for threads than they
    take.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """Return the name of the hardware ("NVIDIA H100 80GB HBM3"), else its architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
