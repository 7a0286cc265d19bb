"""Attention kernels that compute the weights where they cannot be observed."""

from typing import Final

from torch import nn

from vitlens.errors import UnsupportedError

OBSERVABLE: Final = ("eager", "sdpa")  # transformers' names of the implementations whose softmax torch computes itself


def require_observable_attention(module: nn.Module) -> None:
    """Raise UnsupportedError, by name, for a transformers model whose attention is computed by another kernel.

    Flash, flex and paged attention, and kernels from the hub, never call a function of torch that could be observed.
    Modules without a transformers configuration pass.
    """
    for name, part in module.named_modules():
        kernel = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if isinstance(kernel, str) and kernel not in OBSERVABLE:
            raise UnsupportedError(
                f"expected attention that can be observed ({' or '.join(OBSERVABLE)}), found {kernel[:60]!r} in "
                f"{name or 'the model'} ({type(part).__name__}); call set_attn_implementation('sdpa') on it first"
            )
