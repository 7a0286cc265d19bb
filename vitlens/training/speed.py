"""Precision, compilation and gradient checkpointing, chosen for the machine and reported."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch.utils.checkpoint import checkpoint

from vitlens.devices import multiplies_bf16
from vitlens.errors import UnknownNameError, by_caller
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.names import COMPILES, PRECISIONS

# up to this number, attention on a CPU is faster as matrix products than in the fused kernel
FEW_TOKENS: Final = 256
COMPILE_FROM: Final = {
    "cuda": 2000,
    "cpu": 2000,
}  # steps from which a compilation, about a minute, saves time


def choose_precision(device: torch.device, asked: str) -> tuple[str, str]:
    """Return the precision of a training, "fp32" or "bf16", and a note about it.

    auto: bf16 where the device multiplies matrices in it (CUDA from Ampere on; processors with AMX
    or AVX-512 bf16), else fp32. Raises UnknownNameError.
    """
    if asked not in PRECISIONS:
        raise UnknownNameError("precision", asked, PRECISIONS)
    if asked != "auto":
        return asked, f"precision {asked} (given)"
    chosen = "bf16" if multiplies_bf16(device) else "fp32"
    return chosen, f"precision {chosen} (chosen)"


def choose_compiling(device: torch.device, asked: str, *, steps: int) -> tuple[bool, str]:
    """Return whether the model of a training of so many steps is compiled, and a note about it.

    auto: from COMPILE_FROM steps on, where there is a compiler: Triton on CUDA, that of C++ on the
    CPU. Raises UnknownNameError.
    """
    if asked not in COMPILES:
        raise UnknownNameError(by_caller(python="compiling", command="--compile"), asked, COMPILES)
    if asked != "auto":
        return asked == "on", f"compile {asked} (given)"
    if device.type == "cuda":
        available = torch.utils._triton.has_triton()
    else:
        available = device.type == "cpu" and any(map(shutil.which, ("g++", "clang++")))
    compiled = available and steps >= COMPILE_FROM[device.type]
    return (
        compiled,
        f"compile {'on' if compiled else 'off'} "
        f"({f'{steps} steps' if available else 'no compiler found'})",
    )


@contextmanager
def fast_attention(model: Model, device: torch.device) -> Iterator[None]:
    """Our attention computed as matrix products where that is faster, for few tokens on a CPU;
    undone on exit.

    At 65 tokens the fused kernel's backward pass took ten times as long in bf16
    (benchmarks/training.md).
    """
    layout = model.anatomy.layout
    few = device.type == "cpu" and layout is not None and layout.tokens <= FEW_TOKENS
    modules = [
        module for module in model.modules() if few and isinstance(module, MultiHeadSelfAttention)
    ]
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
    own = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, forward in zip(blocks, own):
            del block.forward
            if forward is not None:
                block.forward = forward
