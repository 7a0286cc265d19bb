"""Corresponding patches of two images: mutual nearest neighbours among their tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.errors import InputError

TokenMap = Float[Tensor, "rows columns dim"]


@dataclass(frozen=True)
class Correspondence:
    """Pairs of patches that are each other's nearest neighbours, the most similar first.

    sources, targets: (pairs, 2), row and column in the first and in the second image; similarity: (pairs,), cosines;
    best: for every patch of the first image, row and column of its nearest neighbour in the second, mutual or not.
    """

    sources: Int[Tensor, "pairs 2"]
    targets: Int[Tensor, "pairs 2"]
    similarity: Float[Tensor, " pairs"]
    best: Int[Tensor, "rows columns 2"]


def correspond(
    first: Float[Tensor, "rows columns dim"], second: Float[Tensor, "other_rows other_columns _"]
) -> Correspondence:
    """Pairs of patches of two images that are each other's nearest neighbours by cosine ("best buddies", Amir 2022).

    Tokens as patch_tokens returns them, of one model and layer. Of equally near patches the first is taken. Raises
    InputError for tokens of different widths.
    """
    if first.shape[-1] != second.shape[-1]:
        raise InputError(
            f"expected tokens of one model and layer, found widths {first.shape[-1]} and {second.shape[-1]}"
        )
    similarity = _units(first) @ _units(second).T  # (patches, other patches)
    nearest, nearest_back = _first_greatest(similarity), _first_greatest(similarity.T)
    mutual = (nearest_back[nearest] == torch.arange(len(nearest))).nonzero().flatten()
    strength = similarity[mutual, nearest[mutual]]
    order = strength.argsort(descending=True, stable=True)
    best = _places(nearest, second.shape[1])
    return Correspondence(
        _places(mutual[order], first.shape[1]),
        _places(nearest[mutual[order]], second.shape[1]),
        strength[order],
        best.view(*first.shape[:2], 2),
    )


def _units(tokens: TokenMap) -> Float[Tensor, "patches dim"]:
    flat = tokens.double().flatten(0, 1)
    length = flat.norm(dim=1, keepdim=True)
    units: Tensor = flat / length.where(length > 0, 1)
    return units


def _first_greatest(values: Float[Tensor, "queries keys"]) -> Int[Tensor, " queries"]:
    """The index of each row's maximum; of equal values (to 1e-12) the first."""
    indices: Tensor = torch.from_numpy(values.round(decimals=12).numpy().argmax(1))
    return indices


def _places(indices: Int[Tensor, " pairs"], columns: int) -> Int[Tensor, "pairs 2"]:
    return torch.stack((indices // columns, indices % columns), 1)
