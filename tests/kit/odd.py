"""The default model of tests, odd in every way in which a model can be.

    model = odd()                # evaluation mode; odd(training=True): as a user's module is when
        it is built
    vitlens.relevance(model, odd_images()).shape    # (3, 4, 3): the grid of its patches

A module written by hand, read from its forward passes: images of 32 x 48 px; patches of 8 x 16 px,
cut by two convolutions with batch normalisation between them; CLS and a register first; 3 blocks of
2 heads, whose attention has 0.3 dropout on its weights and returns (batch, tokens, heads, width),
which the block flattens and projects; dropout between; 37 classes.
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import images, shaken

SIZE: Final = (32, 48)
PATCHES: Final = 12  # of 8 x 16 px
PREFIX: Final = 2
CLASSES: Final = tuple(f"class {number}" for number in range(37))


class OddAttention(nn.Module):
    """Returns the heads apart."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x), *self.kv(x).chunk(2, -1))
        )
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return (self.drop(weights) @ v).transpose(1, 2)


class OddBlock(nn.Module):
    """Pre-norm; attention's projection is the block's."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(dim)
        self.between = nn.LayerNorm(dim)
        self.look = OddAttention(dim, heads)
        self.mix = nn.Linear(dim, dim)
        self.think = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.look(self.before(x)).flatten(2))
        return x + self.think(self.between(x))


class OddViT(nn.Module):
    """A stem of convolutions, CLS and a register, blocks, a classifier of CLS."""

    def __init__(self, dim: int = 20, depth: int = 3, heads: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, (2, 4), (2, 4)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, dim, (4, 4), (4, 4)),
        )
        self.first = nn.Parameter(torch.randn(1, PREFIX, dim))
        self.places = nn.Parameter(torch.randn(1, PREFIX + PATCHES, dim))
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(OddBlock(dim, heads) for _ in range(depth))
        self.last = nn.LayerNorm(dim)
        self.answer = nn.Linear(dim, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.drop(torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places)
        for layer in self.layers:
            x = layer(x)
        return self.answer(self.last(x)[:, 0])


def odd(*, training: bool = False, **shape: int) -> vitlens.Model:
    """Return a new one, which a test may change. shape: dim, depth, heads."""
    module = shaken(lambda: OddViT(**shape)).train(training)
    norm = module.stem[1]
    draws = torch.Generator().manual_seed(0)
    # no statistics of 0 and 1 that would hide a mistake
    norm.running_mean.uniform_(-0.2, 0.2, generator=draws)
    norm.running_var.uniform_(0.5, 2, generator=draws)
    mean = (0.5, 0.4, 0.6)
    std = (0.2, 0.3, 0.25)
    return vitlens.wrap(module, image_size=SIZE, mean=mean, std=std, classes=CLASSES, alias="odd")


@cache
def shared_odd() -> vitlens.Model:
    """Return the one that all tests of a process read and none changes."""
    return odd()


def odd_images(batch: int = 3, *, size: tuple[int, int] = SIZE) -> Tensor:
    """Draw noise in [0, 1]."""
    return images(size, batch=batch)
