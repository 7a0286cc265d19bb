"""A user's file with functions that make models or fail, which tests write as my.py."""

import sys
from functools import partial

import neighbour
import torch

import vitlens

sys.stdout.write("to stderr\n")
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


cnn = partial(vitlens.load, "cnn-digits")
module = partial(torch.nn.Linear, 3, 3)
unknown = partial(vitlens.load, "vit-dgits")
exits = partial(sys.exit, 0)
number = 3


def vit():
    return vitlens.load(neighbour.NAME)


def headless():
    layers = torch.nn.Conv2d(3, 4, 32), torch.nn.Flatten()
    return vitlens.wrap(torch.nn.Sequential(*layers), image_size=32, **HALF)


class Own(torch.nn.Module):
    """Its head stands before its blocks, its weights are tied, and it returns a tuple."""

    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(16, classes)
        self.embed = torch.nn.Conv2d(3, 16, 8, stride=8)
        self.positions = torch.nn.Parameter(0.1 * torch.randn(16, 16))
        layer = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "dropout": 0.1}
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, **layer) for _ in range(2)
        )
        self.again = self.embed

    def forward(self, images):
        tokens = self.again(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1)), tokens


def small(classes=4):
    return vitlens.wrap(Own(classes), image_size=32, **HALF)


def unfit():
    return vitlens.wrap(vitlens.load("vit-digits").module, image_size=30, **HALF)


def needs(argument):
    return argument


def raises():
    raise KeyError("two\nlines")
