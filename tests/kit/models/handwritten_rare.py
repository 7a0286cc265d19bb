"""Rarer styles of vision transformers: other axes, orders, stems and blocks.

Images are 24 x 32 px, patches 8 px.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.models.handwritten import (
    DIM,
    GRID,
    HEADS,
    Attention,
    Block,
    Build,
    Mix,
    ViT,
    of,
    weights,
)

# ---- what queries, keys and values (batch, heads, tokens, head_dim) become


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.transpose(0, 1)
    k = k.transpose(0, 1)
    v = v.transpose(0, 1)
    return (weights(q, k) @ v).transpose(0, 1)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqkh", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bqkh,bhkd->bhqd", F.softmax(scores, dim=2), v)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merge batch and heads into one axis."""
    batch = len(q)
    q = q.flatten(0, 1)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
    return torch.bmm(torch.softmax(scores, -1), v).unflatten(0, (batch, -1))


def merged_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(part.flatten(0, 1) for part in (q, k, v))).unflatten(
        0, q.shape[:2]
    )


def five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute scores (batch, 1, heads, query, key), and softmax by named arguments."""
    weights = torch.softmax(input=q[:, None] @ k[:, None].mT / q.shape[-1] ** 0.5, dim=-1)
    return (weights @ v[:, None])[:, 0]


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([weights(q[:, head], k[:, head]) @ v[:, head] for head in range(HEADS)], 1)


def linearised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Apply a softmax of queries over channels, and of keys over tokens."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def styled(mix: Mix, heads: int = HEADS) -> Build:
    """Return the ViT of such attention."""
    return of(partial(Attention, heads, mix))


# ---- attention


class MergedHeadsFirst(Attention):
    """Heads and batch on one axis, the heads first, as in Set Transformer."""

    def forward(self, x: Tensor) -> Tensor:
        q = torch.cat(self.q(x).chunk(self.count, -1))
        k = torch.cat(self.k(x).chunk(self.count, -1))
        v = torch.cat(self.v(x).chunk(self.count, -1))
        return self.o(torch.cat((weights(q, k) @ v).split(len(x)), -1))


class Grouped(Attention):
    """RMS norms, four heads of queries for two of keys and values, a bias of pairs of positions."""

    def __init__(self) -> None:
        super().__init__(heads=4)
        self.k = nn.Linear(DIM, DIM // 2)
        self.v = nn.Linear(DIM, DIM // 2)
        self.q_norm = nn.RMSNorm(DIM // 4)
        self.k_norm = nn.RMSNorm(DIM // 4)
        self.bias = nn.Parameter(torch.randn(4, 14, 14))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (-1, DIM // 4)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, DIM // 4)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, DIM // 4)).transpose(1, 2)
        return self.q_norm(q), self.k_norm(k), v

    def own(self, x: Tensor) -> Tensor:
        q, k, _ = self.split(x)
        scores = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
        return (scores + self.bias[:, : x.shape[1], : x.shape[1]]).softmax(-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias[None, :, : q.shape[2], : q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


class HeadsInside(Attention):
    """The heads' outputs are interleaved, (head_dim, heads), before the projection."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mix(*self.split(x)).permute(0, 2, 3, 1).flatten(2))


class HeadModules(nn.Module):
    """A module for each head, as in lectures on minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Attention(heads=1) for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(x) for head in self.heads)


class Adapted(Attention):
    """A low-rank addition to the output projection, as adapters are written."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        joined = self.mix(*self.split(x)).transpose(1, 2).flatten(2)
        return self.o(joined) + self.low(joined)


class Halves(Attention):
    """Attention in two windows, the left and the right half of the map, cut by hand."""

    def cut(self, x: Tensor) -> Tensor:
        return (
            x.unflatten(1, (GRID[0], 2, GRID[1] // 2)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        )

    def own(self, x: Tensor) -> Tensor:
        return super().own(self.cut(x))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.cut(x))
        return y.unflatten(0, (-1, 2)).unflatten(2, (GRID[0], -1)).transpose(1, 2).flatten(1, 3)


# ---- blocks and models


class Parallel(Block):
    """Attention and MLP side by side, as in ViT-22B."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_a(x)
        return x + self.att(y) + self.ff(y)


class OptionalBlock(Block):
    """A block with an unused argument, returning a tuple."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0
    ) -> tuple[Tensor, None]:
        return super().forward(x) * scale, None


class OptionalViT(ViT):
    """Blocks that take a mask by name and return a tuple; a dict of results; a weight norm."""

    def __init__(self) -> None:
        super().__init__(partial(OptionalBlock, partial(Attention, HEADS, five_axes)))
        for layer in self.layers:
            layer.att.o = nn.utils.parametrizations.weight_norm(layer.att.o)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(x)
        for layer in self.layers:
            x, _ = layer(x, mask=mask, scale=1.0)
        return {"logits": self.out(self.ln(x)[:, 0]), "tokens": x}


class QueryPooled(ViT):
    """No prefix; nn.MultiheadAttention with one learned query pools the patches."""

    def __init__(self) -> None:
        super().__init__(prefix=0)
        self.query = nn.Parameter(torch.randn(1, 1, DIM))
        self.pool = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def read(self, x: Tensor) -> Tensor:
        return self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0]


class RegistersLast(ViT):
    """Two registers after the patches, or before them; the classifier reads the patches' mean."""

    def __init__(self, attention: Build = Attention, *, last: bool = True) -> None:
        super().__init__(partial(Block, attention), prefix=0)
        self.last = last
        self.extra = nn.Parameter(torch.randn(1, 2, DIM))

    def tokens(self, x: Tensor) -> Tensor:
        x, extra = self.patches(x) + self.pos, self.extra.expand(len(x), -1, -1)
        return torch.cat([x, extra] if self.last else [extra, x], 1)

    def read(self, x: Tensor) -> Tensor:
        return (x[:, :-2] if self.last else x[:, 2:]).mean(1)


class ClassLast(RegistersLast):
    """A register at the start, CLS at the end or after it; the classifier reads CLS."""

    def tokens(self, x: Tensor) -> Tensor:
        x = self.patches(x) + self.pos
        cls, register = (token.expand(len(x), -1, -1) for token in self.extra.split(1, 1))
        return torch.cat([register, x, cls] if self.last else [register, cls, x], 1)

    def read(self, x: Tensor) -> Tensor:
        return x[:, -1] if self.last else x[:, 1]


def hybrid() -> ViT:
    """Return a small CNN that sees the whole image before the patches are cut from its map."""
    vit = ViT()
    wide = (
        nn.Conv2d(3, 8, 15, 2, 7),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 15, 2, 7),
        nn.ReLU(),
    )
    vit.stem = nn.Sequential(*wide, nn.Conv2d(8, DIM, 2, 2))
    return vit


def merged_two() -> ViT:
    """Build two heads, which might be a batch of two, next to the MLP; convolutions as in CCT."""
    vit = ViT(partial(Parallel, partial(Attention, 2, merged)))
    widths = ((3, 8), (8, 16), (16, DIM))
    vit.stem = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(*channels, 3, 2, 1), nn.ReLU()) for channels in widths)
    )
    return vit


def shared() -> ViT:
    """Return one block used three times, as in ALBERT."""
    vit = ViT()
    vit.layers = nn.ModuleList([vit.layers[0]] * 3)
    return vit
