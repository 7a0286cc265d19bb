"""One small network with maps in many forms: other orders of axes, tuples, dicts, side branches.

All have the same weights and logits, so that their maps and features are those of the plain form.
The stages compute only by functions: no convolution inside shows a map in another order. Images
are 24 x 32 px, the last map is 6 x 8.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = (24, 32)
GRID = (6, 8)
WIDTHS = (6, 10)
CLASSES = 4

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any, tuple[int, int]], Tensor]


class Named(NamedTuple):
    """A named tuple of a map and its size."""

    size: tuple[int, int]
    values: Tensor


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).mT


def summary(x: Tensor) -> Tensor:
    return x.mean((2, 3))


# how a map (batch, channels, rows, columns) is returned, and how the next stage reads it
FORMS: dict[str, tuple[Pack, Unpack]] = {
    "channels first": (lambda x: x, lambda y, _: y),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), lambda y, _: y.permute(0, 3, 1, 2)),
    "tokens": (tokens, lambda y, size: y.mT.unflatten(2, size)),
    "tokens last": (lambda x: x.flatten(2), lambda y, size: y.unflatten(2, size)),
    "a tuple": (lambda x: (x, x.shape[2:]), lambda y, _: y[0]),
    "the second of a tuple": (lambda x: (summary(x), x), lambda y, _: y[1]),
    "a list": (lambda x: [x], lambda y, _: y[0]),
    "a nested tuple": (
        lambda x: ((tokens(x), None), summary(x)),
        lambda y, size: y[0][0].mT.unflatten(2, size),
    ),
    "a dict": (lambda x: {"size": x.shape[2:], "values": x}, lambda y, _: y["values"]),
    "a named tuple": (
        lambda x: Named(tuple(x.shape[2:]), x.permute(0, 2, 3, 1)),
        lambda y, _: y[1].permute(0, 3, 1, 2),
    ),
}
# forms in which no cell has its place: the map of the image cannot be read from them
NO_MAPS: dict[str, tuple[Pack, Unpack]] = {
    "transposed": (lambda x: x.mT, lambda y, _: y.mT),
    "mirrored": (lambda x: x.flip(-1), lambda y, _: y.flip(-1)),
    "blocks of 2 x 2": (
        lambda x: F.pixel_unshuffle(x, 2).flatten(2)[:, None],
        lambda y, size: F.pixel_shuffle(y[:, 0].unflatten(2, (size[0] // 2, size[1] // 2)), 2),
    ),
    "columns of tokens": (lambda x: tokens(x.mT), lambda y, size: y.mT.unflatten(2, size[::-1]).mT),
}


class Stage(nn.Module):
    """A convolution of stride 2 and a ReLU, by functions."""

    def __init__(self, inputs: int, outputs: int, pack: Pack, unpack: Unpack) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3) / inputs**0.5)
        self.pack = pack
        self.unpack = unpack
        self.size = (0, 0)

    def forward(self, x: Any) -> Any:
        """Read a packed map of `size`, return a packed one."""
        y = F.conv2d(self.unpack(x, self.size), self.weight, stride=2, padding=1)
        return self.pack(F.relu(y))


class Laid(nn.Module):
    """Two stages in a form, and a mean over the last map.

    side: adds a decoder, whose output the logits ignore.
    """

    def __init__(self, form: str = "channels first", *, side: bool = False) -> None:
        super().__init__()
        self.pack, self.unpack = (FORMS | NO_MAPS)[form]
        self.one = Stage(3, WIDTHS[0], self.pack, lambda x, _: x)
        self.two = Stage(*WIDTHS, self.pack, self.unpack)
        self.two.size = (SIZE[0] // 2, SIZE[1] // 2)
        self.out = nn.Linear(WIDTHS[1], CLASSES)
        self.decoder = Stage(WIDTHS[1], 3, lambda x: x, lambda x, _: x) if side else None

    def forward(self, x: Tensor) -> Any:
        """Return the logits; with a decoder, its picture after them."""
        last = self.unpack(self.two(self.one(x)), GRID)
        logits = self.out(last.mean((2, 3)))
        return logits if self.decoder is None else (logits, self.decoder(last))
