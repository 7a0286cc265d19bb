"""Rarer styles of vision transformers: other axes, orders, stems and blocks. Images are 24 x 32 px, patches 8 px.

Every attention module gives its own weights (batch, heads, query, key) by `own`, from the tokens that enter it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.models.handwritten import GRID, PATCH

DIM, HEADS = 24, 3


class Attention(nn.Module):
    """Queries, keys, values and the output projection; `mix` is that of a style."""

    def __init__(self, dim: int = DIM, heads: int = HEADS) -> None:
        super().__init__()
        self.count = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, tokens, head_dim)."""
        q, k, v = (layer(x).unflatten(-1, (self.count, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v

    def own(self, x: Tensor) -> Tensor:
        """The weights (batch, heads, query, key)."""
        q, k, _ = self.split(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads' outputs (batch, heads, tokens, head_dim)."""
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mix(*self.split(x)).transpose(1, 2).flatten(2))


class HeadsFirst(Attention):
    """Scores (heads, batch, query, key)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1)


class SixHeadsFirst(HeadsFirst):
    """As many heads as three times a batch of two, and twice one of three."""

    def __init__(self) -> None:
        super().__init__(heads=6)


class HeadsLast(Attention):
    """Scores (batch, query, key, heads), softmax over the third axis."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(torch.einsum("bhqd,bhkd->bqkh", q, k) / q.shape[-1] ** 0.5, dim=2)
        return torch.einsum("bqkh,bhkd->bhqd", weights, v)


class Merged(Attention):
    """Batch and heads on one axis, by torch.bmm."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads = q.shape[:2]
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5, -1)
        return torch.bmm(weights, v).unflatten(0, (batch, heads))


class MergedFused(Attention):
    """Batch and heads on one axis, by scaled dot-product attention."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read = F.scaled_dot_product_attention(*(part.flatten(0, 1) for part in (q, k, v)))
        return read.unflatten(0, q.shape[:2])


class MergedHeadsFirst(Attention):
    """Heads and batch on one axis, the heads first, as in Set Transformer."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(layer(x).chunk(self.count, -1)) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / q.shape[-1] ** 0.5, -1)
        return self.o(torch.cat(weights.bmm(v).split(len(x)), -1))


class FiveAxes(Attention):
    """Scores (batch, 1, heads, query, key), and softmax by named arguments."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(input=q[:, None] @ k[:, None].mT / q.shape[-1] ** 0.5, dim=-1)
        return (weights @ v[:, None])[:, 0]


class Rotary(Attention):
    """Rotary positions, RMS norms, four query heads for two of keys and values, a learned bias of each pair."""

    def __init__(self) -> None:
        super().__init__(heads=4)
        self.k, self.v = nn.Linear(DIM, DIM // 2), nn.Linear(DIM, DIM // 2)
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // 4), nn.RMSNorm(DIM // 4)
        self.bias = nn.Parameter(torch.randn(4, 14, 14))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, DIM // 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(q.shape[-1] // 2)
        return self._turned(self.q_norm(q), angles), self._turned(self.k_norm(k), angles), v

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)

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


class OneByOne(Attention):
    """A softmax for each head, in a loop."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = [(q[:, head] @ k[:, head].mT / q.shape[-1] ** 0.5).softmax(-1) for head in range(self.count)]
        return torch.stack([each @ v[:, head] for head, each in enumerate(weights)], 1)


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
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.mix(*self.split(x)).transpose(1, 2).flatten(2)
        return self.o(joined) + self.up(self.down(joined))


class Linearised(Attention):
    """Linear attention: softmax of queries over channels, and of keys over tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class Halves(Attention):
    """Attention in two windows, the left and the right half of the map, cut by hand."""

    def cut(self, x: Tensor) -> Tensor:
        """(batch x windows, tokens of a window, dim)."""
        return x.unflatten(1, (GRID[0], 2, GRID[1] // 2)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def own(self, x: Tensor) -> Tensor:
        return super().own(self.cut(x))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.cut(x))
        return y.unflatten(0, (-1, 2)).unflatten(2, (GRID[0], -1)).transpose(1, 2).flatten(1, 3)


class Block(nn.Module):
    """Pre-norm, attention of a style and an MLP, LayerScale."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.att = attention()
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.gamma = nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.att(self.norm_a(x))
        return x + self.gamma * self.ff(self.norm_b(x))


class RareViT(nn.Module):
    """CLS, learned positions, two blocks of a style."""

    attention: type[nn.Module] = Attention
    block: type[Block] = Block

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.extra = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos = nn.Parameter(torch.randn(1, 1 + GRID[0] * GRID[1], DIM))
        self.layers = nn.ModuleList(self.block(self.attention) for _ in range(2))
        self.ln, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, classes)

    def patches(self, x: Tensor) -> Tensor:
        """The patches, row by row, without positions."""
        return self.stem(x).flatten(2).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """The tokens that enter the first block."""
        x = self.patches(x)
        return torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.pos

    def read(self, x: Tensor) -> Tensor:
        """What the classifier reads of the last tokens."""
        return x[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.read(self.ln(x)))


def of(attention: type[nn.Module]) -> type[RareViT]:
    """The ViT of an attention style."""
    return type(f"{attention.__name__}ViT", (RareViT,), {"attention": attention})


class RegistersLast(RareViT):
    """Two registers after the patches; the classifier reads the mean of the patches."""

    last = True

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(1, 2, DIM))
        self.pos = nn.Parameter(torch.randn(1, GRID[0] * GRID[1], DIM))
        for block in self.layers:
            nn.init.ones_(block.gamma)  # a scale that is no module's is not known to direct logit attribution

    def tokens(self, x: Tensor) -> Tensor:
        x, extra = self.patches(x) + self.pos, self.extra.expand(len(x), -1, -1)
        return torch.cat([x, extra] if self.last else [extra, x], 1)

    def read(self, x: Tensor) -> Tensor:
        return (x[:, :-2] if self.last else x[:, 2:]).mean(1)


class ClassLast(RegistersLast):
    """CLS at the end, a register at the start; the classifier reads CLS."""

    def tokens(self, x: Tensor) -> Tensor:
        x = self.patches(x) + self.pos
        cls, register = (each.expand(len(x), -1, -1) for each in self.extra.split(1, 1))
        return torch.cat([register, x, cls] if self.last else [register, cls, x], 1)

    def read(self, x: Tensor) -> Tensor:
        return x[:, -1] if self.last else x[:, 1]


class RotaryLast(RegistersLast):
    """Registers last in attention that depends on the tokens' positions: their order cannot be changed."""

    attention = Rotary


class SimpleLast(RegistersLast):
    """vit-pytorch's SimpleViT with registers: all blocks in one module."""

    class Blocks(nn.ModuleList):
        """They run one after another."""

        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = x + layer.gamma * layer.att(layer.norm_a(x))
                x = x + layer.gamma * layer.ff(layer.norm_b(x))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Blocks(self.layers)])


class Hybrid(RareViT):
    """A small CNN that sees the whole image before the patches are cut from its map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 15, 2, 7), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 15, 2, 7), nn.ReLU(),
            nn.Conv2d(8, DIM, 2, 2),
        )  # fmt: skip


class QueryPooled(RareViT):
    """No prefix; nn.MultiheadAttention with one learned query pools the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, DIM))
        self.pool = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def tokens(self, x: Tensor) -> Tensor:
        return self.patches(x) + self.pos[:, 1:]

    def read(self, x: Tensor) -> Tensor:
        return self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0]


class Shared(RareViT):
    """One block used three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)


class Windowed(RareViT):
    """No prefix, attention in windows, mean over the patches."""

    attention = Halves

    def tokens(self, x: Tensor) -> Tensor:
        return self.patches(x) + self.pos[:, 1:]

    def read(self, x: Tensor) -> Tensor:
        return x.mean(1)


class MergedTwo(RareViT):
    """Two heads, which might be a batch of two, beside the MLP as in ViT-22B; overlapping convolutions as in CCT."""

    class Two(Merged):
        """Two heads."""

        def __init__(self) -> None:
            super().__init__(heads=2)

    class Parallel(Block):
        """Attention and MLP side by side."""

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm_a(x)
            return x + self.gamma * self.att(y) + self.gamma * self.ff(y)

    attention, block = Two, Parallel

    def __init__(self) -> None:
        super().__init__()
        widths = ((3, 8), (8, 16), (16, DIM))
        self.stem = nn.Sequential(*(nn.Sequential(nn.Conv2d(*each, 3, 2, 1), nn.ReLU()) for each in widths))


class Optional(RareViT):
    """Blocks that take a mask by name and return a tuple; a dict of results; a weight norm of the projections."""

    class Block(Block):
        """A block with an unused argument, returning a tuple."""

        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, None]:
            return super().forward(x) * scale, None

    attention, block = FiveAxes, Block

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.att.o = nn.utils.parametrizations.weight_norm(layer.att.o)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(x)
        for layer in self.layers:
            x, _ = layer(x, mask=mask, scale=1.0)
        return {"logits": self.out(self.ln(x)[:, 0]), "tokens": x}
