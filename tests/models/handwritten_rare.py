"""Rarer styles of vision transformers: other axes, orders, stems and blocks. Images are 24 x 32 px, patches 8 px.

Every attention module gives its own weights (batch, heads, query, key) by `own`, from the tokens that enter it.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.handwritten import GRID, PATCH

DIM, HEADS = 24, 3


class Attention(nn.Module):
    """Queries, keys, values and the output projection; `forward` is that of a style."""

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

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HeadsFirst(Attention):
    """Scores (heads, batch, query, key)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1) for part in self.split(x))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((weights @ v).permute(1, 2, 0, 3).flatten(2))


class SixHeadsFirst(HeadsFirst):
    """As many heads as three times a batch of two, and twice one of three."""

    def __init__(self) -> None:
        super().__init__(heads=6)


class HeadsLast(Attention):
    """Scores (batch, query, key, heads), softmax over the third axis."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.count, -1)) for layer in (self.q, self.k, self.v))
        weights = F.softmax(torch.einsum("bqhd,bkhd->bqkh", q, k) / q.shape[-1] ** 0.5, dim=2)
        return self.o(torch.einsum("bqkh,bkhd->bqhd", weights, v).flatten(2))


class KeysFirst(Attention):
    """Scores (batch, heads, key, query), softmax over the keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (k @ q.mT / q.shape[-1] ** 0.5).softmax(-2)
        return self.o((weights.mT @ v).transpose(1, 2).flatten(2))


class Merged(Attention):
    """Batch and heads on one axis, by torch.bmm."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (part.reshape(batch * self.count, tokens, -1) for part in self.split(x))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5, -1)
        joined = torch.bmm(weights, v).view(batch, self.count, tokens, -1).transpose(1, 2)
        return self.o(joined.reshape(batch, tokens, dim))


class MergedTwo(Merged):
    """Two heads, which might be a batch of two."""

    def __init__(self) -> None:
        super().__init__(heads=2)


class MergedHeadsFirst(Attention):
    """Heads and batch on one axis, the heads first, as in Set Transformer."""

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        q, k, v = (torch.cat(layer(x).chunk(self.count, -1)) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / q.shape[-1] ** 0.5, -1)
        return self.o(torch.cat(weights.bmm(v).split(batch), -1))


class Rotary(Attention):
    """Rotary positions of the patches (one axis), RMS norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().split(x)
        angles = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(q.shape[-1] // 2)
        return self._turned(self.q_norm(q), angles), self._turned(self.k_norm(k), angles), v

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Grouped(Attention):
    """Four query heads, two of keys and values."""

    def __init__(self) -> None:
        super().__init__(heads=4)
        self.k, self.v = nn.Linear(DIM, DIM // 2), nn.Linear(DIM, DIM // 2)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, DIM // 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v

    def own(self, x: Tensor) -> Tensor:
        q, k, _ = self.split(x)
        return (q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class Biased(Attention):
    """A learned bias of each pair of tokens, added as attn_mask."""

    def __init__(self) -> None:
        super().__init__()
        tokens = 1 + GRID[0] * GRID[1]
        self.bias = nn.Parameter(torch.randn(HEADS, tokens, tokens))

    def own(self, x: Tensor) -> Tensor:
        q, k, _ = self.split(x)
        return (q @ k.mT / q.shape[-1] ** 0.5 + self.bias).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])
        return self.o(read.transpose(1, 2).flatten(2))


class HeadsInside(Attention):
    """Columns in (head_dim, heads) order, so that the heads of the projection are interleaved."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, self.count)).permute(0, 3, 1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((weights @ v).permute(0, 2, 3, 1).flatten(2))


class OneByOne(Attention):
    """A softmax for each head, in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = [(q[:, head] @ k[:, head].mT / q.shape[-1] ** 0.5).softmax(-1) for head in range(self.count)]
        return self.o(torch.cat([each @ v[:, head] for head, each in enumerate(weights)], -1))


class HeadModules(nn.Module):
    """A module for each head, as in lectures on minGPT."""

    class Head(nn.Module):
        """Its own queries, keys and values."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(DIM, DIM // HEADS, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = F.softmax(self.q(x) @ self.k(x).transpose(-2, -1) * (DIM // HEADS) ** -0.5, dim=-1)
            return weights @ self.v(x)

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.o = nn.ModuleList(self.Head() for _ in range(HEADS)), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([head(x) for head in self.heads], -1))


class FiveAxes(Attention):
    """Scores (batch, 1, heads, query, key), and softmax by named arguments."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.split(x))
        weights = torch.softmax(input=q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        return self.o((weights @ v)[:, 0].transpose(1, 2).flatten(2))


class MergedFused(Attention):
    """Batch and heads on one axis, by scaled dot-product attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in self.split(x))
        read = F.scaled_dot_product_attention(q, k, v)
        return self.o(read.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


class LowRank(nn.Module):
    """A linear layer with a low-rank addition beside it, as adapters are written."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(Attention):
    """Low-rank additions to all its linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = map(LowRank, (self.q, self.k, self.v, self.o))


class Parametrised(Attention):
    """A weight norm of the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.utils.parametrizations.weight_norm(self.o)


class Linearised(Attention):
    """Linear attention: softmax of queries over channels, and of keys over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        context = k.softmax(-2).mT @ v
        return self.o((q.softmax(-1) @ context).transpose(1, 2).flatten(2))


class Sigmoid(Attention):
    """Sigmoid in place of softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 - 2.5).sigmoid()
        return self.o((weights @ v).transpose(1, 2).flatten(2))


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


class ParallelBlock(Block):
    """Attention and MLP side by side, as in ViT-22B."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_a(x)
        return x + self.gamma * self.att(y) + self.gamma * self.ff(y)


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

    def tokens(self, x: Tensor) -> Tensor:
        """The tokens that enter the first block."""
        x = self.stem(x).flatten(2).transpose(1, 2)
        return torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.pos

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.ln(x)[:, 0])


def of(attention: type[nn.Module], block: type[Block] = Block) -> type[RareViT]:
    """The ViT of an attention and block style."""
    return type(f"{attention.__name__}{block.__name__}ViT", (RareViT,), {"attention": attention, "block": block})


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
        x, extra = self.stem(x).flatten(2).transpose(1, 2) + self.pos, self.extra.expand(len(x), -1, -1)
        return torch.cat([x, extra] if self.last else [extra, x], 1)

    def read(self, x: Tensor) -> Tensor:
        """What the classifier reads of the last tokens."""
        return (x[:, :-2] if self.last else x[:, 2:]).mean(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.read(self.ln(x)))


class ClassLast(RegistersLast):
    """CLS at the end, a register at the start; the classifier reads CLS."""

    def tokens(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2) + self.pos
        cls, register = (each.expand(len(x), -1, -1) for each in self.extra.split(1, 1))
        return torch.cat([register, x, cls] if self.last else [register, cls, x], 1)

    def read(self, x: Tensor) -> Tensor:
        return x[:, -1] if self.last else x[:, 1]


class RotaryLast(RegistersLast):
    """Registers last in attention that depends on the tokens' positions: their order cannot be changed."""

    attention = Rotary


class Alternating(nn.Module):
    """vit-pytorch's Transformer: attention and feed-forward modules in a list, residuals in the loop, a last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        forward = [nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)]
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(DIM), Attention()), nn.Sequential(*copy.deepcopy(forward))])
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention, forward in self.layers:
            x = attention(x) + x
            x = forward(x) + x
        return self.norm(x)


class SimpleLast(RegistersLast):
    """vit-pytorch's SimpleViT with registers: all blocks in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.ln = Alternating(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.read(self.layers(self.tokens(x))))


class Overlapping(RareViT):
    """A stem of overlapping convolutions, as in CCT."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, DIM, 3, 2, 1)
        )


class Hybrid(RareViT):
    """A small CNN that sees the whole image before the patches are cut from its map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 7, 2, 3), nn.ReLU(),
            nn.Conv2d(8, 8, 5, 1, 2), nn.ReLU(), nn.Conv2d(8, DIM, 2, 2),
        )  # fmt: skip


class QueryPooled(RareViT):
    """No prefix; nn.MultiheadAttention with one learned query pools the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, GRID[0] * GRID[1], DIM))
        self.query = nn.Parameter(torch.randn(1, 1, DIM))
        self.pool = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).transpose(1, 2) + self.pos

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        x = self.ln(x)
        return self.out(self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0])


class Shared(RareViT):
    """One block used three times, as in ALBERT."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for _ in range(3):
            x = self.layers[0](x)
        return self.out(self.ln(x)[:, 0])


class Halves(Attention):
    """Attention in two windows, the left and the right half of the map, cut by hand."""

    def cut(self, x: Tensor) -> Tensor:
        """(batch x windows, tokens of a window, dim)."""
        return x.unflatten(1, (GRID[0], 2, GRID[1] // 2)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def own(self, x: Tensor) -> Tensor:
        return super().own(self.cut(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.cut(x))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        y = self.o((weights @ v).transpose(1, 2).flatten(2))
        return y.unflatten(0, (-1, 2)).unflatten(2, (GRID[0], -1)).transpose(1, 2).flatten(1, 3)


class Windowed(RareViT):
    """No prefix, attention in windows, mean over the patches."""

    attention = Halves

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).transpose(1, 2) + self.pos[:, 1:]

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.ln(x).mean(1))


class Optional(RareViT):
    """Extra arguments with defaults, blocks that take a mask by name, a tuple of results."""

    class Block(Block):
        """A block with an unused argument, returning a tuple."""

        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, None]:  # type: ignore[override]
            return super().forward(x) * scale, None

    block = Block

    def forward(self, x: Tensor, mask: Tensor | None = None, return_tokens: bool = False) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.tokens(x)
        for layer in self.layers:
            x, _ = layer(x, mask=mask, scale=1.0)
        return {"logits": self.out(self.ln(x)[:, 0]), "tokens": x}
