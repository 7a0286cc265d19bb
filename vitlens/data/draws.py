"""Random numbers by hashing: the draws of a scene depend only on its key.

With a generator, the numbers of scene 7 would depend on how many were drawn before it, and on the
batch size. A hash of (key, position) does not depend on either.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WORD = 0xFFFFFFFF  # keeps 32 bits


def mix(words: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Hash 32-bit words, held in int64, one to one (the constants of C. Wellons' lowbias32)."""
    words = words & _WORD
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & _WORD
    words = ((words ^ (words >> 15)) * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


def keys(seed: int, *words: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Return one 32-bit key for each row of words and a seed."""
    key = mix(torch.full_like(words[0], seed & _WORD))
    for word in words:
        key = mix(key + word)
    return key


def uniform(
    keys: Int[Tensor, " batch"], count: int, *, stream: int = 0
) -> Float[Tensor, "batch count"]:
    """Return `count` numbers in [0, 1) for each key; different streams give different numbers."""
    # a stream has 2^24 positions
    positions = mix(torch.arange(count, device=keys.device) + (stream << 24))
    words = mix(keys[:, None] + positions)
    return (words >> 8).float() / (1 << 24)  # float32 holds 24 bits exactly
