"""Tiny models for attributions: ViTs with a grid that is not square and with registers, a CNN on images not square."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.tiny import CLASSES, FAMILIES, model_of, ours, shaken
from vitlens.models.anatomy import Anatomy
from vitlens.models.language_image import with_prompts
from vitlens.models.model import Model, Provenance
from vitlens.models.rebuild import prune_heads
from vitlens.models.resnet import CifarResNet, build_resnet
from vitlens.preprocessing import Preprocessing
from vitlens.shapes import TokenLayout


def cnn(size: tuple[int, int] = (32, 48)) -> Model:
    """One block a stage; the last map has a quarter of the rows and columns."""
    return model_of(shaken(lambda: CifarResNet(blocks=1, classes=5)), alias="cnn", size=size)


def registers() -> Model:
    """CLS and four registers before 4 x 4 patches."""
    return FAMILIES["dinov2-registers"]()


MODELS: dict[str, Callable[[], Model]] = {"vit": ours, "registers": registers, "cnn": lambda: cnn((16, 24))}


class Linear(nn.Module):
    """Logits that are linear in the pixels."""

    def __init__(self, size: tuple[int, int], *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(len(CLASSES), 3 * size[0] * size[1], generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight.T + 0.5


def linear(size: tuple[int, int] = (8, 12), *, grid: tuple[int, int] = (4, 3)) -> Model:
    """A linear model that declares the patch layout of a ViT."""
    patch = size[0] // grid[0], size[1] // grid[1]
    return with_layout(Linear(size), TokenLayout(grid, patch))


def with_layout(module: nn.Module, layout: TokenLayout) -> Model:
    """A model around any module, declared to have these patches; pixels are not normalised."""
    model = Model(
        module,
        alias="made",
        anatomy=Anatomy("other", (), layout),
        preprocessing=Preprocessing(layout.image_size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        classes=CLASSES,
        provenance=Provenance("made", "random"),
        architecture={},
    )
    return model.eval().requires_grad_(False)


def planted(module: nn.Module, grid: tuple[int, int], patch_size: tuple[int, int]) -> Model:
    """A model around any module, declared to have these patches."""
    return with_layout(module, TokenLayout(grid, patch_size))


def resnet18() -> Model:
    return model_of(shaken(lambda: build_resnet("resnet18", classes=5, image_size=(32, 48))), size=(32, 48))


def headless(layer: int) -> Model:
    """A ViT of three blocks, one of which has lost its two heads."""
    return prune_heads(ours(depth=3), {layer: (0, 1)})


def prompted(model: Model) -> Model:
    """A language-image model with five prompts at random."""
    prompts = F.normalize(torch.randn(5, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    return with_prompts(model, CLASSES, prompts)
