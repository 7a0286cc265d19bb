"""A vision transformer of one layer, made by hand: its weights give each head a known pattern."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kit.made import uniform
from tests.kit.tiny import model_of
from vitlens.models.configs import ViTConfig
from vitlens.models.model import Model
from vitlens.models.vit import VisionTransformer

PATCH = 4  # px
STRONG = 7.0  # nats: a key in a pattern has e^7 times the weight of one outside it
# channels of a token: its colour, from -1 to 1, then 1; whether the patch bears a mark
RGB = 4
MARK = 1


@dataclass(frozen=True)
class Scenes:
    """images (n, 3, height, width) in [0, 1]; masks (n, height, width) of their objects."""

    images: Tensor
    masks: Tensor


def scenes(grid: tuple[int, int], count: int, seed: int) -> Scenes:
    """Draw patches whose red and green lie on a circle at random angles, with an object.

    The object is a rectangle of half the sides or more with high blue; 1 or 2 patches are marked.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, columns = grid
    angle = 2 * math.pi * torch.rand(count, rows, columns, generator=draw)
    colour = torch.stack((angle.cos(), angle.sin(), -torch.ones_like(angle)), 1) * 0.8
    masks = torch.zeros(count, rows, columns, dtype=torch.bool)
    marks = torch.zeros(count, rows * columns)
    for image in range(count):
        tall, wide = (int(torch.randint(side // 2, side, (1,), generator=draw)) for side in grid)
        top = int(torch.randint(rows - tall + 1, (1,), generator=draw))
        left = int(torch.randint(columns - wide + 1, (1,), generator=draw))
        masks[image, top : top + tall, left : left + wide] = True
        marks[image, torch.randperm(rows * columns, generator=draw)[: 1 + image % 2]] = 1
    colour[:, 2][masks] = 0.8
    pixels = (colour / 2 + 0.5).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    # mean 0 in every patch
    stripes = torch.tensor([0.1, -0.1]).repeat_interleave(PATCH // 2).repeat(columns)
    marked = (
        marks.view(count, rows, columns).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    )
    pixels[:, 2] += marked * stripes
    return Scenes(pixels, masks.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2))


class Bench:
    """The scores (tokens, tokens) and bilinear forms from which heads are made.

    tokens: CLS, a register, patches.
    """

    def __init__(self, grid: tuple[int, int], seed: int) -> None:
        self.grid = grid
        self.patches = grid[0] * grid[1]
        self.draw = torch.Generator().manual_seed(seed)
        self.tokens = self.patches + 2
        self.width = self.tokens + RGB + MARK  # one channel for each token, then its content
        places = torch.arange(self.patches)
        row = places // grid[1]
        column = places % grid[1]
        self.down = row - row[:, None]
        self.across = column - column[:, None]

    def is_edge(self, patch: int) -> bool:
        """Return True if it is one of the outermost patches."""
        row, column = divmod(patch, self.grid[1])
        return row in (0, self.grid[0] - 1) or column in (0, self.grid[1] - 1)

    def form(self, queries: Any, keys: Any, score: Tensor | float) -> Tensor:
        """Return a form in which queries with some channels score so for keys with others."""
        form = torch.zeros(self.width, self.width)
        form[queries, keys] = score
        return form

    def offsets(self, inside: Tensor) -> Tensor:
        """Return a form in which patches attend to the pairs (query, key) that are inside."""
        return self.form(slice(2, self.tokens), slice(2, self.tokens), STRONG * inside.float())

    def places(self, keys: list[int]) -> Tensor:
        """Return a form in which all tokens attend to these tokens."""
        return self.form(slice(self.tokens), keys, STRONG)

    def content(self, channel: int, sign: float) -> Tensor:
        """Return a form in which all attend to patches by a channel of their content."""
        every = slice(self.tokens)
        return self.form(every, self.tokens + channel, sign * STRONG) + self.form(
            every, slice(2), -2 * STRONG
        )

    def noise(self) -> Tensor:
        """Return scores without a pattern: at random for each pair of tokens."""
        every = slice(self.tokens)
        return self.form(
            every, every, 3 * torch.randn(self.tokens, self.tokens, generator=self.draw)
        )

    def heads(self) -> dict[str, Tensor]:
        """Return the form of every planted head, by its label; noise is at the end."""
        down = self.down
        across = self.across
        colours = range(self.tokens, self.tokens + 3)
        place = 2 + int(torch.randint(self.patches, (1,), generator=self.draw))
        inside = {
            "self": (down == 0) & (across == 0),
            "previous": (down == 0) & (across == -1),
            "next": (down == 0) & (across == 1),
            "above": (down == -1) & (across == 0),
            "below": (down == 1) & (across == 0),
            "same row": down == 0,
            "same column": across == 0,
            "left": across < 0,
            "right": across > 0,
            "up": down < 0,
            "down": down > 0,
            "local": (down.abs() <= 1) & (across.abs() <= 1),
            "dead": down == 0,
        }
        return {
            "uniform": self.places([]),
            "CLS": self.places([0]),
            "register": self.places([1]),
            "position": self.places([place]),
            "border": self.places([2 + at for at in range(self.patches) if self.is_edge(at)]),
            "sink": self.content(RGB, 1),
            "object": self.content(2, 1),
            "background": self.content(2, -1),
            # all colours are equally far from grey
            "similar": self.form(colours, colours, 3 * STRONG),
            **{name: self.offsets(selected) for name, selected in inside.items()},
            "noise 1": self.noise(),
            "noise 2": self.noise(),
        }


def planted(
    forms: list[Tensor],
    grid: tuple[int, int],
    *,
    dead: tuple[int, ...] = (),
    seed: int = 0,
    depth: int = 1,
) -> Model:
    """Build a model whose last layer has a head for each bilinear form.

    score(query, key) = query form keyᵀ; dead: heads without values; earlier layers add nothing.
    """
    heads = len(forms)
    width = len(forms[0])
    size = (grid[0] * PATCH, grid[1] * PATCH)
    config = ViTConfig(
        image_size=size,
        patch_size=(PATCH, PATCH),
        dim=heads * width,
        depth=depth,
        heads=heads,
        classes=5,
        registers=1,
        mlp=False,
        norm=False,
        qkv_bias=False,
    )
    module = VisionTransformer(config)
    patches = grid[0] * grid[1]
    tokens = patches + 2
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (module.cls_token, module.reg_token, module.pos_embed):
            parameter.zero_()
        module.pos_embed[0, 0, 0] = 1
        module.reg_token[0, 0, 1] = 1
        module.pos_embed[0, 1:, 2:tokens] = torch.eye(patches)
        kernel = module.patch_embed.proj.weight.zero_()
        bias = module.patch_embed.proj.bias.zero_()
        for channel in range(3):
            kernel[tokens + channel, channel] = 1 / PATCH**2
        bias[tokens + 3] = 1
        kernel[tokens + RGB, 2, :, : PATCH // 2], kernel[tokens + RGB, 2, :, PATCH // 2 :] = (
            5 / PATCH**2,
            -5 / PATCH**2,
        )
        for block in module.blocks:
            block.attn.qkv.weight.zero_()
        query, key, value = module.blocks[-1].attn.qkv.weight.view(3, heads, width, heads * width)
        for head, form in enumerate(forms):
            query[head, :, :width] = form.T * math.sqrt(width)
            key[head, :, :width] = torch.eye(width)
            value[head, :, :width] = torch.randn(width, width, generator=draw) * (head not in dead)
    return model_of(module, alias="planted", size=size)


class Maker:
    """Weights (images, query, key) of one head, rows of the prefix uniform."""

    def __init__(
        self, grid: tuple[int, int], prefix: int, *, images: int = 12, seed: int = 0
    ) -> None:
        self.grid = grid
        self.prefix = prefix
        self.images = images
        self.patches = grid[0] * grid[1]
        self.tokens = self.patches + prefix
        self.generator = torch.Generator().manual_seed(seed)
        places = torch.arange(self.patches)
        self.down = places // grid[1]
        self.across = places % grid[1]

    def head(self, patches: Tensor) -> Tensor:
        """Return weights of a head from what patches do to patches.

        patches: (patches, patches), or one for each image.
        """
        weights = self.even().clone()
        weights[:, self.prefix :] = 0
        weights[:, self.prefix :, self.prefix :] = patches / patches.sum(-1, keepdim=True)
        return weights

    def even(self) -> Tensor:
        """Return the same on all tokens."""
        return uniform(self.images, 1, self.tokens)[:, 0]

    def row(self) -> Tensor:
        """Return attention to all patches of the query's row."""
        return self.head((self.down[:, None] == self.down).float())

    def beside(self) -> Tensor:
        """Return attention to the right neighbour, or to itself at the end of a row."""
        step = torch.where(self.across + 1 < self.grid[1], 1, 0)
        return self.head(torch.eye(self.patches)[torch.arange(self.patches) + step])

    def on(self, key: int) -> Tensor:
        """Return attention of all patches to this token."""
        weights = self.even().clone()
        weights[:, self.prefix :] = torch.eye(self.tokens)[key]
        return weights

    def random_keys(self) -> Tensor:
        """Return another key for every query of every image."""
        keys = torch.randint(self.patches, (self.images, self.patches), generator=self.generator)
        return self.head(torch.eye(self.patches)[keys])

    def own_key(self) -> Tensor:
        """Return one key for all queries of an image, another in each image."""
        keys = torch.randperm(self.patches, generator=self.generator)[: self.images]
        return self.head(torch.eye(self.patches)[keys][:, None].expand(-1, self.patches, -1))


def looking_evenly(model: Model) -> Model:
    """Set queries and bias to zero: attention is uniform wherever the masks of windows allow it."""
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "qkv" in name or "relative_position_bias" in name:
                parameter.zero_()
    return model
