"""Which patch of one image is which patch of another: mutual nearest neighbours among their tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.errors import InputError

TokenMap = Float[Tensor, "rows columns dim"]


@dataclass(frozen=True)
class Correspondence:
    """Pairs of patches that are each other's nearest, the most similar first.

    sources, targets: (pairs, 2), row and column in the first and in the second image; similarity: (pairs,), cosines;
    best: for every patch of the first image the row and column of its nearest in the second, mutual or not.
    """

    sources: Int[Tensor, "pairs 2"]
    targets: Int[Tensor, "pairs 2"]
    similarity: Float[Tensor, " pairs"]
    best: Int[Tensor, "rows columns 2"]


def correspond(
    first: Float[Tensor, "rows columns dim"], second: Float[Tensor, "other_rows other_columns _"]
) -> Correspondence:
    """Pairs of patches of two images that are each other's nearest by cosine (Amir 2022's "best buddies").

    Tokens as patch_tokens gives them, of one model and layer. Of equally near patches the first is taken. Raises
    InputError for tokens of different widths.
    """
    if first.shape[-1] != second.shape[-1]:
        raise InputError(
            f"expected tokens of one model and layer, found widths {first.shape[-1]} and {second.shape[-1]}"
        )
    similarity = _units(first) @ _units(second).T  # (patches, other patches)
    there, back = _first_greatest(similarity), _first_greatest(similarity.T)
    mutual = (back[there] == torch.arange(len(there))).nonzero().flatten()
    strength = similarity[mutual, there[mutual]]
    order = strength.argsort(descending=True, stable=True)
    best = _places(there, second.shape[1])
    return Correspondence(
        _places(mutual[order], first.shape[1]),
        _places(there[mutual[order]], second.shape[1]),
        strength[order],
        best.view(*first.shape[:2], 2),
    )


def _units(tokens: TokenMap) -> Float[Tensor, "patches dim"]:
    flat = tokens.double().flatten(0, 1)
    length = flat.norm(dim=1, keepdim=True)
    units: Tensor = flat / length.where(length > 0, 1)
    return units


def _first_greatest(values: Float[Tensor, "queries keys"]) -> Int[Tensor, " queries"]:
    """Where each row is greatest; of equal ones (to 1e-12) the first."""
    found: Tensor = torch.from_numpy(values.round(decimals=12).numpy().argmax(1))
    return found


def _places(indices: Int[Tensor, " pairs"], columns: int) -> Int[Tensor, "pairs 2"]:
    return torch.stack((indices // columns, indices % columns), 1)
