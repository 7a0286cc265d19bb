"""Patch tokens as colours: their first principal components over all images together, as in the DINOv2 paper.

As Oquab 2023, figure 1: patches of similar content have similar colours across images, because all images share one
PCA. With a threshold, the first component separates foreground from background, and the colours are those of a second
PCA of the foreground only.
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
    """The first three principal components of each patch.

    scores: (n, rows, columns, 3) on the principal components, 0 in the background; explained: each component's share
    of the variance (of the foreground's, with a threshold); foreground: (n, rows, columns), all true without one.
    """

    scores: Float[Tensor, "images rows columns 3"]
    explained: Float[Tensor, " 3"]
    foreground: Bool[Tensor, "images rows columns"]

    def colours(self) -> Float[Tensor, "images rows columns 3"]:
        """Scores as red, green and blue in [0, 1]: each component from its minimum to its maximum over all images.

        Background is black. A component that does not vary is 0.5.
        """
        inside = self.scores[self.foreground]
        low, high = inside.amin(0), inside.amax(0)
        flat = high <= low
        scaled = torch.where(flat, 0.5, (self.scores - low) / torch.where(flat, 1, high - low))
        return scaled.clamp(0, 1) * self.foreground[..., None]


def patch_components(tokens: PatchTokens, *, foreground: float | None = None) -> PatchComponents:
    """The first three principal components of the patches of all images together.

    foreground: a threshold in [0, 1] on the first component, scaled from its minimum to its maximum: patches above it
    are foreground. The sign of the component is arbitrary; the foreground is taken to be the side that covers less of
    the images' borders. Raises InputError for another threshold, DataError for patches that are all the same or fewer
    than 4 in the foreground.
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
    projected, explained = principal(chosen, count=min(COMPONENTS, chosen.shape[1]))
    scores = torch.zeros(*grid, COMPONENTS, dtype=torch.float64)
    scores[inside] = torch.nn.functional.pad(projected, (0, COMPONENTS - projected.shape[1]))
    return PatchComponents(scores, torch.nn.functional.pad(explained, (0, COMPONENTS - len(explained))), inside)


def _foreground(tokens: PatchTokens, threshold: float) -> Bool[Tensor, "images rows columns"]:
    first = principal(tokens.flatten(0, 2), count=1)[0].view(tokens.shape[:3])
    share = (first - first.min()) / (first.max() - first.min())
    return min((share > threshold, 1 - share > threshold), key=_at_border)


def _at_border(inside: Bool[Tensor, "images rows columns"]) -> float:
    """The share of the borders that a mask covers minus the share of the rest; infinite for an empty mask."""
    border = torch.ones_like(inside)
    border[:, 1:-1, 1:-1] = False
    if not inside.any():
        return torch.inf
    return float(inside[border].double().mean() - inside[~border].double().mean()) if not border.all() else 0.0
