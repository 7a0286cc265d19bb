"""Choose and report precision, compilation and gradient checkpointing for the machine."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitlens.devices import multiplies_bf16
from vitlens.errors import UnknownNameError, by_caller
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.names import COMPILES, PRECISIONS

# up to this number, attention on a CPU is faster as matrix products than in the fused kernel
FEW_TOKENS: Final = 256
# steps from which a compilation, about a minute, saves time
COMPILE_FROM: Final = {"cuda": 2000, "cpu": 2000}


def choose_precision(device: torch.device, setting: str) -> tuple[str, str]:
    """Return the precision of a training, "fp32" or "bf16", and a note on it.

    With the setting "auto", it is bf16 if the device multiplies matrices in it, else fp32. CUDA
    devices do from Ampere on, and processors with AMX or AVX-512 bf16. Raises UnknownNameError.
    """
    if setting not in PRECISIONS:
        raise UnknownNameError("precision", setting, PRECISIONS)
    if setting != "auto":
        return setting, f"precision {setting} (given)"
    precision = "bf16" if multiplies_bf16(device) else "fp32"
    return precision, f"precision {precision} (chosen)"


def choose_compiling(device: torch.device, setting: str, *, steps: int) -> tuple[bool, str]:
    """Return True if the model of a training of so many steps is compiled, and a note on it.

    With the setting "auto", it is compiled from COMPILE_FROM steps on, if there is a compiler. On
    CUDA, this is Triton; on the CPU, it is one for C++. Raises UnknownNameError.
    """
    if setting not in COMPILES:
        name = by_caller(python="compiling", command="--compile")
        raise UnknownNameError(name, setting, COMPILES)
    if setting != "auto":
        return setting == "on", f"compile {setting} (given)"
    if device.type == "cuda":
        has_compiler = torch.utils._triton.has_triton()
    else:
        has_compiler = device.type == "cpu" and any(map(shutil.which, ("g++", "clang++")))
    if not has_compiler:
        return False, "compile off (no compiler found)"
    compiles = steps >= COMPILE_FROM[device.type]
    return compiles, f"compile {'on' if compiles else 'off'} ({steps} steps)"


@contextmanager
def fast_attention(model: Model, device: torch.device) -> Iterator[None]:
    """Compute our attention as matrix products for few tokens on a CPU; undone on exit.

    At 65 tokens the fused kernel's backward pass took ten times as long in bf16
    (benchmarks/training.md).
    """
    layout = model.anatomy.layout
    modules = []
    has_few_tokens = layout is not None and layout.tokens <= FEW_TOKENS
    if device.type == "cpu" and has_few_tokens:
        modules = [
            module for module in model.modules() if isinstance(module, MultiHeadSelfAttention)
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
    """Recompute the blocks' activations in the backward pass (Chen 2016); undone on exit.

    on: False to change nothing.
    """
    blocks: list[nn.Module] = []
    if on:
        blocks = [model.module.get_submodule(name) for name in model.anatomy.blocks]
    # an instance may have a forward in place of that of its class, which must be put back
    instance_forwards = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, forward in zip(blocks, instance_forwards):
            del block.forward
            if forward is not None:
                block.forward = forward
