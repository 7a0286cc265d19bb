"""Tiny models for attributions: ViTs with odd grids and registers, and a CNN."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.tiny import CLASSES, FAMILIES, bare, ours, small_cnn
from vitlens.models.anatomy import Anatomy
from vitlens.models.language_image import with_prompts
from vitlens.models.model import Model
from vitlens.shapes import TokenLayout

MODELS: dict[str, Callable[[], Model]] = {
    "vit": ours,
    "registers": FAMILIES["dinov2-registers"],  # CLS and four registers before 4 x 4 patches
    "cnn": lambda: small_cnn((16, 24)),
}


class Linear(nn.Module):
    """Logits that are linear in the pixels."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(
            torch.randn(len(CLASSES), 3 * size[0] * size[1], generator=generator)
        )

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight.T + 0.5


def linear(grid: tuple[int, int] = (4, 3), patch: tuple[int, int] = (2, 4)) -> Model:
    """Return a linear model of 8 x 12 px without normalisation, with the patch layout of a ViT."""
    layout = TokenLayout(grid, patch)
    return bare(Linear(layout.image_size), layout.image_size, anatomy=Anatomy("other", (), layout))


def prompted(model: Model) -> Model:
    """Return a language-image model with five prompts at random."""
    prompts = F.normalize(torch.randn(5, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    return with_prompts(model, CLASSES, prompts)


def affinity(model: Model, images: Tensor, layers: Sequence[int] | None = None) -> Tensor:
    """Return attention between patches, mean over heads, plus its transpose, with rows of sum 1."""
    first = len(model.layout.prefix)
    affinities = [
        layer[:, :, first:, first:].double().mean(1) for layer in vitlens.attention(model, images)
    ]
    if layers is not None:
        affinities = [affinities[layer] for layer in range(len(affinities)) if layer in layers]
    total = torch.stack(affinities).sum(0)
    both = total + total.mT
    return both / both.sum(-1, keepdim=True)
