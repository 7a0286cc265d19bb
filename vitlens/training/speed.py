"""Precision, compilation and gradient checkpointing, chosen for the machine and reported."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitlens.devices import multiplies_bf16
from vitlens.errors import UnknownNameError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.names import COMPILES, PRECISIONS

FEW_TOKENS: Final = 256  # up to this number, attention on a CPU is faster as matrix products than in the fused kernel
COMPILE_FROM: Final = {"cuda": 2000, "cpu": 2000}  # steps from which a compilation, about a minute, saves time


@dataclass(frozen=True)
class Computation:
    """How steps are computed: "fp32" or "bf16", whether the model is compiled, and both as notes."""

    precision: str
    compiled: bool
    notes: tuple[str, ...]


def choose(device: torch.device, *, precision: str = "auto", compiling: str = "auto", steps: int) -> Computation:
    """Precision and compilation for a device and a number of steps.

    precision auto: bf16 where the device multiplies matrices in it (CUDA from Ampere on; processors with AMX or
    AVX-512 bf16), else fp32; compiling auto: from COMPILE_FROM steps on, where there is a compiler. Raises
    UnknownNameError.
    """
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if compiling not in COMPILES:
        raise UnknownNameError("--compile", compiling, COMPILES)
    origin = "given" if precision != "auto" else "chosen"
    if precision == "auto":
        precision = "bf16" if multiplies_bf16(device) else "fp32"
    enough, available = steps >= COMPILE_FROM.get(device.type, steps + 1), _can_compile(device)
    compiled = compiling == "on" or (compiling == "auto" and enough and available)
    reason = "given" if compiling != "auto" else f"{steps} steps" if available else "no compiler found"
    return Computation(
        precision, compiled, (f"precision {precision} ({origin})", f"compile {'on' if compiled else 'off'} ({reason})")
    )


def _can_compile(device: torch.device) -> bool:
    """Whether torch.compile can run: it needs Triton on CUDA, a C++ compiler on the CPU."""
    if device.type == "cuda":
        return torch.utils._triton.has_triton()
    return device.type == "cpu" and any(map(shutil.which, ("g++", "clang++")))


@contextmanager
def fast_attention(model: Model, device: torch.device) -> Iterator[None]:
    """Our attention computed as matrix products where that is faster, for few tokens on a CPU; undone on exit.

    At 65 tokens the fused kernel's backward pass took ten times as long in bf16 (benchmarks/training.md).
    """
    layout = model.anatomy.layout
    has_few_tokens = device.type == "cpu" and layout is not None and layout.tokens <= FEW_TOKENS
    modules = (
        [module for module in model.modules() if isinstance(module, MultiHeadSelfAttention)] if has_few_tokens else []
    )
    flags = [module.fused for module in modules]
    try:
        for module in modules:
            module.fused = False
        yield
    finally:
        for module, fused in zip(modules, flags):
            module.fused = fused


@contextmanager
def gradient_checkpointing(model: Model, *, on: bool = True) -> Iterator[None]:
    """Recompute the blocks' activations in the backward pass (Chen 2016); undone on exit."""
    blocks = [model.module.get_submodule(name) for name in model.anatomy.blocks] if on else []
    forwards: list[tuple[nn.Module, Any]] = [(block, block.__dict__.get("forward")) for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, forward in forwards:
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = forward
