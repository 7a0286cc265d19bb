"""Vision models as people write them by hand: attention, blocks, tokens, stems, and a CNN.

Images are 24 x 32 px, patches 8 px. Attention that gives its own weights does so by `own`, from the
tokens that enter it: `own_weights` reads them.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.tiny import images

SIZE = (24, 32)
PATCH = 8
GRID = (3, 4)
HALF = (0.5, 0.5, 0.5)
DIM = 24
HEADS = 3
Build = Callable[[], nn.Module]
# from queries, keys and values to outputs (batch, heads, tokens, ..)
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def seeded(build: Build) -> nn.Module:
    """Return a module with the same random weights each time, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def half(
    module: nn.Module, image_size: int | tuple[int, int] = SIZE, **hints: Any
) -> vitlens.Model:
    """Return a module as a model of pixels from 0 to 1, which takes them from -1 to 1."""
    return vitlens.wrap(module, image_size=image_size, mean=HALF, std=HALF, **hints)


def wrapped(build: Build, **hints: Any) -> vitlens.Model:
    """Wrap that module as a model."""
    return half(seeded(build), **hints)


noise = partial(images, SIZE, batch=3, seed=1)


def own_weights(module: nn.Module, images: Tensor) -> list[Tensor]:
    """Return each layer's attention weights as the module computes them.

    They come by `own`, of nn.Softmax or of nn.MultiheadAttention.
    """
    outputs: list[Tensor] = []

    def see(
        part: Any, inputs: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> None:
        if isinstance(part, nn.Softmax):
            outputs.append(output)
        elif isinstance(part, nn.MultiheadAttention):
            query, key, value = (
                inputs[:3] if inputs else (kwargs[name] for name in ("query", "key", "value"))
            )
            outputs.append(
                nn.MultiheadAttention.forward(part, query, key, value, average_attn_weights=False)[
                    1
                ]
            )
        else:
            outputs.append(part.own(inputs[0]))

    for part in module.modules():
        if hasattr(part, "own") or isinstance(part, nn.Softmax | nn.MultiheadAttention):
            part.register_forward_hook(see, with_kwargs=True)
    with torch.no_grad():
        module((images - 0.5) / 0.5)
    return outputs


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Queries, keys, values and the output projection; `mix` is that of a style."""

    def __init__(self, heads: int = HEADS, style: Mix = fused, *, bias: bool = True) -> None:
        super().__init__()
        self.count = heads
        self.style = style
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=bias) for _ in range(4))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (batch, heads, tokens, head_dim)."""
        q = self.q(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
        return q, k, v

    def own(self, x: Tensor) -> Tensor:
        return weights(*self.split(x)[:2])

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.style(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mix(*self.split(x)).transpose(1, 2).flatten(2))


class Softmax(Attention):
    """One layer of queries, keys and values, scores, softmax, dropout, products, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.to_qkv = nn.Linear(DIM, 3 * DIM)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.count, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(weights(q, k), 0.1, self.training) @ v


def feedforward() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class Block(nn.Module):
    """Pre-norm, attention of a style and an MLP."""

    def __init__(self, attention: Build = Attention) -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(DIM)
        self.norm_b = nn.LayerNorm(DIM)
        self.att = attention()
        self.ff = feedforward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm_a(x))
        return x + self.ff(self.norm_b(x))


class MultiheadBlock(Block):
    """nn.MultiheadAttention as in tutorials, with weights that are dropped; an MLP of no module."""

    def __init__(self) -> None:
        super().__init__(partial(nn.MultiheadAttention, DIM, 4, batch_first=True))
        self.ff = None
        self.linear1 = nn.Linear(DIM, 2 * DIM)
        self.linear2 = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_a(x)
        x = x + self.att(y, y, y)[0]
        return x + self.linear2(F.gelu(self.linear1(self.norm_b(x))))


class InlineBlock(Attention):
    """Attention computed in the block itself, and a gateless MLP; no biases."""

    def __init__(self) -> None:
        super().__init__(heads=2, bias=False)
        self.a = nn.LayerNorm(DIM)
        self.b = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def own(self, x: Tensor) -> Tensor:
        return super().own(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(self.a(x))
        return x + self.down(F.silu(self.up(self.b(x))))


class ViT(nn.Module):
    """Patches, special tokens, learned positions, blocks; the classifier reads CLS or the mean."""

    def __init__(
        self, block: Build = Block, *, depth: int = 2, prefix: int = 1, classes: int = 5
    ) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.extra = nn.Parameter(torch.randn(1, prefix, DIM))
        self.pos = nn.Parameter(torch.randn(1, prefix + GRID[0] * GRID[1], DIM))
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.ln = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, classes)

    def patches(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        return torch.cat([self.extra.expand(len(x), -1, -1), self.patches(x)], 1) + self.pos

    def read(self, x: Tensor) -> Tensor:
        return x[:, 0] if self.extra.shape[1] else x.mean(1)

    def forward(self, x: Tensor) -> Any:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.read(self.ln(x)))


def of(attention: Build, **options: Any) -> Build:
    """Return the ViT of an attention style."""
    return partial(ViT, partial(Block, attention), **options)


SoftmaxViT = of(Softmax, depth=3)
MultiheadViT = partial(ViT, MultiheadBlock, prefix=3, classes=3)


class EinsumViT(ViT):
    """Patches cut by reshaping, layers in a list, residuals in the outer loop; returns a tuple."""

    class Attention(nn.Module):
        """By einsum, with its own norm, in the style of vit-pytorch."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(DIM)
            self.attend = nn.Softmax(dim=-1)
            self.to_q = nn.Linear(DIM, DIM, bias=False)
            self.to_kv = nn.Linear(DIM, 2 * DIM, bias=False)
            self.to_out = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            q, k, v = (
                part.unflatten(-1, (2, -1)) for part in (self.to_q(x), *self.to_kv(x).chunk(2, -1))
            )
            attn = self.attend(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5)
            return self.to_out(torch.einsum("bhij,bjhd->bihd", attn, v).flatten(2))

    def __init__(self) -> None:
        super().__init__(depth=0, classes=4)
        self.stem = nn.Sequential(
            nn.LayerNorm(3 * PATCH**2), nn.Linear(3 * PATCH**2, DIM), nn.LayerNorm(DIM)
        )
        pairs = (
            [self.Attention(), nn.Sequential(nn.LayerNorm(DIM), *feedforward())] for _ in range(2)
        )
        self.layers = nn.ModuleList(map(nn.ModuleList, pairs))

    def patches(self, x: Tensor) -> Tensor:
        x = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
        return self.stem(x.flatten(3).flatten(1, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(x)
        for attention, feedforward in self.layers:
            x = attention(x) + x
            x = feedforward(x) + x
        return self.out(x[:, 0]), x


class EncoderViT(ViT):
    """nn.TransformerEncoder (post-norm, tokens first), mean over the patches."""

    def __init__(self) -> None:
        super().__init__(depth=0, prefix=0, classes=3)
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.tokens(x).transpose(0, 1)).mean(0))


class InlineViT(ViT):
    """No prefix, attention and MLP in one module; returns an object with .logits."""

    def __init__(self) -> None:
        super().__init__(InlineBlock, depth=3, prefix=0, classes=3)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(x))


class SmallCNN(nn.Module):
    """Three convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1),
            nn.ReLU(),
        )
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.features(x).mean((2, 3))))
