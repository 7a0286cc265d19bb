"""Patch tokens as colours: their principal components over all images together, the picture of the DINOv2 paper.

As Oquab 2023, figure 1: patches of like content get like colours, across images, because one PCA serves them all. With
a threshold, the first component parts foreground from background, and the colours are those of a second PCA of the
foreground alone.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.features.embedding import principal
from vitlens.analysis.features.features import PatchTokens
from vitlens.errors import DataError, InputError

COMPONENTS: Final = 3  # red, green, blue


@dataclass(frozen=True)
class PatchComponents:
    """Three numbers a patch.

    scores: (n, rows, columns, 3) on the principal components, 0 in the background; explained: each component's share
    of the variance (of the foreground's, where there is a threshold); foreground: (n, rows, columns), all where not.
    """

    scores: Float[Tensor, "images rows columns 3"]
    explained: Float[Tensor, " 3"]
    foreground: Bool[Tensor, "images rows columns"]

    def colours(self) -> Float[Tensor, "images rows columns 3"]:
        """Scores as red, green and blue in [0, 1]: each component from its least to its greatest over all images.

        Background is black. A component that does not vary is at one half.
        """
        inside = self.scores[self.foreground]
        low, high = inside.amin(0), inside.amax(0)
        flat = high <= low
        scaled = torch.where(flat, 0.5, (self.scores - low) / torch.where(flat, 1, high - low))
        return scaled.clamp(0, 1) * self.foreground[..., None]


def patch_components(tokens: PatchTokens, *, foreground: float | None = None) -> PatchComponents:
    """The first three principal components of the patches of all images together.

    foreground: a threshold in [0, 1] on the first component, scaled from its least to its greatest value: patches
    above it are foreground. Which end is the foreground the component does not say; it is taken to be the one that
    touches the images' borders less. Raises InputError for another threshold, DataError for patches that are all the
    same or fewer than 4 in the foreground.
    """
    if foreground is not None and not 0 <= foreground <= 1:
        raise InputError(f"expected a threshold of the foreground from 0 to 1, found {foreground:g}")
    grid = tokens.shape[:3]
    inside = torch.ones(grid, dtype=torch.bool) if foreground is None else _foreground(tokens, foreground)
    chosen = tokens[inside]
    if len(chosen) <= COMPONENTS:
        raise DataError(
            f"expected at least {COMPONENTS + 1} patches to colour, found {len(chosen)}; lower the threshold"
        )
    found, explained = principal(chosen, count=min(COMPONENTS, chosen.shape[1]))
    scores = torch.zeros(*grid, COMPONENTS, dtype=torch.float64)
    scores[inside] = torch.nn.functional.pad(found, (0, COMPONENTS - found.shape[1]))
    return PatchComponents(scores, torch.nn.functional.pad(explained, (0, COMPONENTS - len(explained))), inside)


def _foreground(tokens: PatchTokens, threshold: float) -> Bool[Tensor, "images rows columns"]:
    first = principal(tokens.flatten(0, 2), count=1)[0].view(tokens.shape[:3])
    share = (first - first.min()) / (first.max() - first.min())
    return min((share > threshold, 1 - share > threshold), key=_at_border)


def _at_border(inside: Bool[Tensor, "images rows columns"]) -> float:
    """How much more of the borders than of the rest a mask covers; nothing at all is no foreground."""
    border = torch.ones_like(inside)
    border[:, 1:-1, 1:-1] = False
    if not inside.any():
        return torch.inf
    return float(inside[border].double().mean() - inside[~border].double().mean()) if not border.all() else 0.0
