"""Attention that is no plain softmax of scores, or has heads elsewhere.

Each takes the attention module, then queries, keys and values (batch, heads, tokens, head_dim).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.models.handwritten import DIM, GRID, HEADS, Attention, Block, Build, ViT

Mixing = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
KEPT = 4  # keys of the greatest weights


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / q.shape[-1] ** 0.5


class Kind(Attention):
    """Attention of one of these kinds, with what they need."""

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.mixing = mixing
        self.gate = nn.Parameter(torch.randn(HEADS, 1, 1))
        self.heads = nn.Parameter(torch.randn(HEADS, HEADS))
        self.talk = nn.Conv2d(HEADS, HEADS, 1)
        self.to_heads = nn.Linear(HEADS, HEADS)
        self.attend = nn.Sequential(nn.Softmax(dim=-1), nn.Dropout(0.1))
        self.masked = Masked()
        self.talking = Talking()

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mixing(self, q, k, v)


class Masked(nn.Module):
    """Scores to weights, with a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, scores: Tensor) -> Tensor:
        return self.drop(F.softmax(scores, dim=-1))


class Talking(Masked):
    """Scores mixed over heads first."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Conv2d(HEADS, HEADS, 1)

    def forward(self, scores: Tensor) -> Tensor:
        return super().forward(self.talk(scores))


# ---- softmax of scores, as it is written


def in_sequence(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.attend(scores(q, k)) @ v


def in_a_helper(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.masked(scores(q, k)) @ v


def in_a_talking_helper(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.talking(scores(q, k)) @ v


def talking_before(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.talk(scores(q, k)).softmax(-1) @ v


def linear_before(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.to_heads(scores(q, k).movedim(1, -1)).movedim(-1, 1).softmax(-1) @ v


def greatest_scores(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    least = scores(q, k).topk(KEPT).values[..., -1:]
    return scores(q, k).masked_fill(scores(q, k) < least, -torch.inf).softmax(-1) @ v


def gated_outputs(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) @ v) * module.gate.sigmoid()


def normed_again(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1) + 1e-8
    return (weights / weights.sum(-1, keepdim=True)) @ v


SEEN = (
    in_sequence,
    in_a_helper,
    in_a_talking_helper,
    talking_before,
    linear_before,
    greatest_scores,
    gated_outputs,
    normed_again,
)

# ---- weights changed after the softmax


def greatest(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    weights = weights.masked_fill(weights < weights.topk(KEPT).values[..., -1:], 0)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def greatest_where(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return (
        torch.where(
            weights < weights.topk(KEPT).values[..., -1:], torch.zeros_like(weights), weights
        )
        @ v
    )


def greatest_scattered(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    top = weights.topk(KEPT)
    return torch.zeros_like(weights).scatter_(-1, top.indices, top.values) @ v


def greatest_in_place(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    weights[weights < weights.topk(KEPT).values[..., -1:]] = 0
    return weights @ v


def greatest_gathered(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    top = scores(q, k).softmax(-1).topk(KEPT)
    places = top.indices[..., None].expand(*top.indices.shape, v.shape[-1])
    values = v[:, :, None].expand(-1, -1, v.shape[2], -1, -1).gather(3, places)
    return torch.einsum("bhqk,bhqkd->bhqd", top.values, values)


def gated(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * module.gate.sigmoid()) @ v


def by_columns(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return (weights / weights.sum(-2, keepdim=True)) @ v


CHANGED = (
    greatest,
    greatest_where,
    greatest_scattered,
    greatest_in_place,
    greatest_gathered,
    gated,
    by_columns,
)

# ---- no softmax of scores


def sigmoid(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).sigmoid() @ v


def squared_relu(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).relu().square() / k.shape[2] @ v


def linearised(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def by_kernel(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = F.elu(q) + 1
    k = F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


UNSEEN = (sigmoid, squared_relu, linearised, by_kernel)


def of_layers(*mixings: Mixing | None) -> Build:
    """Return a ViT of layers of these kinds; None: fused."""
    return partial(_of_layers, mixings)


def _of_layers(mixings: tuple[Mixing | None, ...]) -> ViT:
    model = ViT(depth=0)
    model.layers = nn.ModuleList(
        Block(Attention if mixing is None else partial(Kind, mixing)) for mixing in mixings
    )
    return model


# ---- windows


class Windows(Attention):
    """Attention in the rows of the map.

    order: of the axes: "hw" heads before windows, "wh" after them, "bh" and "bw" with the first of
    them on the batch's axis; the outputs are joined as Hiera's are, the windows side by side.
    is_fused: by torch's kernel.
    """

    def __init__(self, heads: int, windows: int, order: str, *, is_fused: bool) -> None:
        super().__init__(heads)
        self.windows = windows
        self.order = order
        self.is_fused = is_fused

    def own(self, x: Tensor) -> Tensor:
        """Return weights (batch x windows, heads, query, key)."""
        q = self.cut(self.q(x))
        k = self.cut(self.k(x))
        return scores(q, k).softmax(-1).transpose(1, 2).flatten(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        """Cut into windows: (batch, heads, windows, tokens, head_dim)."""
        return (
            x.unflatten(1, (-1, self.windows))
            .unflatten(-1, (self.count, -1))
            .permute(0, 3, 2, 1, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cut(layer(x)) for layer in (self.q, self.k, self.v)]
        if self.order in ("wh", "bw"):
            parts = [part.transpose(1, 2) for part in parts]
        if self.order in ("bh", "bw"):
            parts = [part.flatten(0, 1) for part in parts]
        q, k, v = parts
        y = (
            F.scaled_dot_product_attention(q, k, v)
            if self.is_fused
            else scores(q, k).softmax(-1) @ v
        )
        if self.order in ("bh", "bw"):
            y = y.unflatten(0, (len(x), -1))
        if self.order in ("wh", "bw"):
            y = y.transpose(1, 2)
        return self.o(y.permute(0, 3, 2, 1, 4).reshape(x.shape))


def windowed(heads: int, windows: int, order: str, *, is_fused: bool) -> Build:
    """Return a ViT of such windows, without special tokens."""
    assert GRID[0] * GRID[1] % windows == 0
    assert DIM % heads == 0
    return partial(
        ViT, partial(Block, partial(Windows, heads, windows, order, is_fused=is_fused)), prefix=0
    )
