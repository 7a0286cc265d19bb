"""Random numbers by hashing: the draws of scene i depend on its own key and on nothing else.

A generator hands out its stream in order, so what scene 7 gets would depend on how many were drawn before it, and on
the size of the batch. A hash of (key, position) does not.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WORD = 0xFFFFFFFF


def mix(words: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Scramble 32-bit words, held in int64; one to one (the constants of C. Wellons' lowbias32)."""
    words = words & _WORD
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & _WORD
    words = ((words ^ (words >> 15)) * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


def keys(seed: int, *words: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """One 32-bit key for each row of words, under a seed."""
    key = mix(torch.full_like(words[0], seed & _WORD))
    for word in words:
        key = mix(key + word)
    return key


def uniform(keys: Int[Tensor, " batch"], count: int, *, stream: int = 0) -> Float[Tensor, "batch count"]:
    """count numbers in [0, 1) for each key; another stream gives other numbers."""
    positions = mix(torch.arange(count, device=keys.device) + (stream << 24))
    return (mix(keys[:, None] + positions) >> 8).float() / (1 << 24)
