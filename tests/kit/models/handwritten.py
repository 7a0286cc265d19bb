"""Vision models as people write them by hand: five styles of attention, and a CNN. Images are 24 x 32 px.

Attention that gives its own weights does so by `own`, from the tokens that enter it: `own_weights` reads them.
"""

from collections.abc import Callable
from functools import partial
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


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A module with the same random weights each time, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def half(module: nn.Module, image_size: int | tuple[int, int] = SIZE, **told: Any) -> vitlens.Model:
    """A module as a model of pixels from 0 to 1, which takes them from -1 to 1."""
    return vitlens.wrap(module, image_size=image_size, mean=HALF, std=HALF, **told)


def wrapped(build: Callable[[], nn.Module], **told: Any) -> vitlens.Model:
    """That module as a model."""
    return half(seeded(build), **told)


noise = partial(images, SIZE, batch=3, seed=1)


def own_weights(module: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention weights of each layer as the module has them: by `own`, of nn.Softmax or nn.MultiheadAttention."""
    kept: list[Tensor] = []

    def see(part: Any, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        if isinstance(part, nn.Softmax):
            kept.append(output)
        elif isinstance(part, nn.MultiheadAttention):
            query, key, value = inputs[:3] if inputs else (named[name] for name in ("query", "key", "value"))
            kept.append(nn.MultiheadAttention.forward(part, query, key, value, average_attn_weights=False)[1])
        else:
            kept.append(part.own(inputs[0]))

    for part in module.modules():
        if hasattr(part, "own") or isinstance(part, nn.Softmax | nn.MultiheadAttention):
            part.register_forward_hook(see, with_kwargs=True)
    with torch.no_grad():
        module((images - 0.5) / 0.5)
    return kept


class SoftmaxAttention(nn.Module):
    """Scores, softmax and products, in the style of minGPT."""

    def __init__(self, dim: int, count: int, drop: float) -> None:
        super().__init__()
        self.count = count
        self.to_qkv, self.mix = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def own(self, x: Tensor) -> Tensor:
        """The weights (batch, heads, query, key)."""
        q, k, _ = self.to_qkv(x).unflatten(-1, (3, self.count, -1)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.to_qkv(x).view(batch, tokens, 3, self.count, dim // self.count).permute(2, 0, 3, 1, 4)
        weights = self.drop((q @ k.transpose(-2, -1) * (dim // self.count) ** -0.5).softmax(dim=-1))
        return self.mix((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


class SoftmaxBlock(nn.Module):
    """Pre-norm, attention and feed-forward layers."""

    def __init__(self, dim: int, count: int, drop: float) -> None:
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.sa = SoftmaxAttention(dim, count, drop)
        self.feedforward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln_a(x))
        return x + self.feedforward(self.ln_b(x))


class SoftmaxViT(nn.Module):
    """CLS, learned positions, a list of blocks."""

    def __init__(self, dim: int = 24, depth: int = 3, count: int = 3, classes: int = 5, drop: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, PATCH, PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, dim))
        self.places = nn.Parameter(torch.randn(1, 1 + GRID[0] * GRID[1], dim))
        self.encoder = nn.ModuleList(SoftmaxBlock(dim, count, drop) for _ in range(depth))
        self.ln, self.out = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.encoder:
            x = block(x)
        return self.out(self.ln(x)[:, 0])


class EinsumAttention(nn.Module):
    """Attention by einsum, with its own norm, in the style of vit-pytorch."""

    def __init__(self, dim: int, h: int) -> None:
        super().__init__()
        self.norm, self.h = nn.LayerNorm(dim), h
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.attend, self.to_out = nn.Softmax(dim=-1), nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.h, -1)) for part in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        attn = self.attend(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5)
        return self.to_out(torch.einsum("bhij,bjhd->bihd", attn, v).flatten(2))


class EinsumViT(nn.Module):
    """Patches cut by reshaping, attention and feed-forward layers in a list, residuals in the outer loop."""

    def __init__(self, dim: int = 24, depth: int = 2, h: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(3 * PATCH**2), nn.Linear(3 * PATCH**2, dim), nn.LayerNorm(dim))
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 1 + GRID[0] * GRID[1], dim))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    EinsumAttention(dim, h),
                    nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
                ]
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, img: Tensor) -> tuple[Tensor, Tensor]:
        x = img.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], 1) + self.pos
        for attention, feedforward in self.layers:
            x = attention(x) + x
            x = feedforward(x) + x
        return self.head(x[:, 0]), x


class MultiheadBlock(nn.Module):
    """nn.MultiheadAttention as tutorials call it: with the weights returned, and dropped."""

    def __init__(self, dim: int, h: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, h, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        attended, _ = self.attention(y, y, y)
        x = x + attended
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class MultiheadViT(nn.Module):
    """CLS and two registers; the classifier reads CLS."""

    def __init__(self, dim: int = 24, depth: int = 2, h: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, dim, PATCH, PATCH)
        self.extra = nn.Parameter(torch.randn(1, 3, dim))
        self.pos = nn.Parameter(torch.randn(1, GRID[0] * GRID[1], dim))
        self.blocks = nn.Sequential(*(MultiheadBlock(dim, h) for _ in range(depth)))
        self.classify = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patchify(x).flatten(2).transpose(1, 2) + self.pos
        return self.classify(self.blocks(torch.cat([self.extra.expand(len(x), -1, -1), x], 1))[:, 0])


class EncoderViT(nn.Module):
    """nn.TransformerEncoder (post-norm, tokens first), mean over the patches."""

    def __init__(self, dim: int = 24, depth: int = 2, h: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, PATCH, PATCH)
        self.pos = nn.Parameter(torch.randn(GRID[0] * GRID[1], 1, dim))
        layer = nn.TransformerEncoderLayer(dim, h, 2 * dim)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.classify = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).permute(2, 0, 1) + self.pos
        return self.classify(self.encoder(x).mean(0))


class InlineBlock(nn.Module):
    """Attention computed in the block itself, by scaled dot-product attention; no biases."""

    def __init__(self, dim: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.a, self.b = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ([(dim, dim)] * 4 + [(dim, 2 * dim), (2 * dim, dim)])
        )

    def own(self, x: Tensor) -> Tensor:
        """The weights (batch, heads, query, key)."""
        q, k = (layer(self.a(x)).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in (self.q, self.k))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        q, k, v = (layer(y).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.b(x))))


class InlineViT(nn.Module):
    """No prefix, a classifier over the mean of the patches, an object with .logits."""

    class Output:
        """What transformers' models return."""

        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    def __init__(self, dim: int = 24, depth: int = 3, h: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, PATCH, PATCH)
        self.pos = nn.Parameter(torch.randn(1, GRID[0] * GRID[1], dim))
        self.trunk = nn.Sequential(*(InlineBlock(dim, h) for _ in range(depth)))
        self.classify = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> "InlineViT.Output":
        x = self.trunk(self.stem(x).flatten(2).transpose(1, 2) + self.pos)
        return InlineViT.Output(self.classify(x.mean(1)))


class SmallCNN(nn.Module):
    """Three convolutions with batch norm and dropout."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16),
            nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(),
        )  # fmt: skip
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.features(x).mean((2, 3))))
