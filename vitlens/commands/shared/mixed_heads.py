"""Layers that mix the weights of their heads after the softmax: rows and the limitation of a report; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MixedHeadsRow:
    """One attention module that mixes the weights over heads after the softmax (talking heads, CaiT)."""

    module: str


def mixed_heads_words(rows: Sequence[MixedHeadsRow]) -> str:
    """That the weights are those before the mixing."""
    layers = f"{len(rows)} layer{'' if len(rows) == 1 else 's'}"
    return (
        f"In {layers} (talking heads) the attention weights are those before a linear map mixes them over heads: "
        "these are not the weights that multiply the values."
    )
