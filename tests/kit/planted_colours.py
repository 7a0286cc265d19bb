"""A model that sees the colour of each class wherever it is, and images of one colour each."""

from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

import vitlens
from tests.kit.planted_games import written
from tests.kit.splits import split_of
from vitlens.data.split import Split
from vitlens.models.model import Model

SIDE = 24
CLASSES = 12
COUNT = 40
LEVELS = (0.0, 0.5, 1.0), (0.0, 1.0), (0.0, 1.0)  # of red, green and blue


class Hues(nn.Module):
    """A model whose logits are the amounts of each class's colour, wherever it is.

    Pixels are normalised to [-1, 1] before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 3, bias=False)  # changes nothing
        self.block.weight.data = torch.eye(3)
        self.register_buffer("colours", torch.tensor(list(product(*LEVELS))))

    def nearness(self, images: Tensor) -> Tensor:
        """Return the nearness of pixels to classes' colours (batch, classes, height, width)."""
        red, green, blue = (  # a colour is a level of each channel
            (-60 * (channel[:, None] - images.new_tensor(levels)[:, None, None]).square()).exp()
            for channel, levels in zip(images.unbind(1), LEVELS, strict=True)
        )
        return (red[:, :, None, None] * (green[:, :, None] * blue[:, None])[:, None]).flatten(1, 3)

    def forward(self, images: Tensor) -> Tensor:
        return 40 * self.nearness(self.block(images.movedim(1, 3)).movedim(3, 1) / 2 + 0.5).mean(
            (2, 3)
        )


def coloured() -> Model:
    half = (0.5, 0.5, 0.5)
    return vitlens.wrap(
        Hues(),
        image_size=SIDE,
        mean=half,
        std=half,
        classes="abcdefghijkl",
        blocks=("block",),
        alias="hues",
    )


def flat_images() -> Split:
    """Draw images of one colour each on the left two thirds, with noise on the right."""
    colours = Hues().colours[torch.arange(COUNT) % CLASSES]
    images = colours[:, :, None, None].expand(-1, -1, SIDE, SIDE).clone()
    images[..., 16:] = torch.rand(COUNT, 3, SIDE, 8, generator=torch.Generator().manual_seed(2))
    return split_of(images, None, tuple("abcdefghijkl"))


def near(model: Model, images: Tensor, targets: Tensor) -> Tensor:
    """Return the model's own evidence: the planted method."""
    return model.module.nearness(images)[torch.arange(len(images)), targets]


def write(folder: Path) -> str:
    """Write images that are one colour everywhere, with squares as masks.

    Return what to type after `vitlens explain`.
    """
    masks = torch.zeros(CLASSES, SIDE, SIDE, dtype=torch.uint8)
    masks[:, 6:18, 4:16] = 255
    colours = (255 * Hues().colours).round().byte()[:, None, None].expand(-1, SIDE, SIDE, -1)
    return written(folder, colours.contiguous(), masks, f"hues={__file__}:coloured")
