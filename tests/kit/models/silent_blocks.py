"""Blocks that add nothing, between those of a model: same results, other numbers."""

from collections.abc import Callable

from torch import Tensor, nn

from tests.kit.models.handwritten import DIM, ViT, feedforward


class Silent(nn.Module):
    """An MLP without attention, which adds nothing to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = feedforward()
        nn.init.zeros_(self.mlp[2].weight)
        nn.init.zeros_(self.mlp[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class SilentMixer(Silent):
    """A depthwise convolution in the place of attention, which adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.mix(x))


class Clipped(nn.Module):
    """A step without weights, which changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1e4, 1e4)


def plain() -> ViT:
    return ViT(depth=3)


def listed(*members: Callable[[], nn.Module] | None) -> ViT:
    """Build the plain model with these members in its list of blocks; None is its next block."""
    model = plain()
    blocks = iter(model.layers)
    model.layers = nn.ModuleList(
        [next(blocks) if member is None else member() for member in members]
    )
    return model
