"""Models with planted attention: weights prepared for each image, through a softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.kit.tiny import bare
from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.ablation.units import Unit
from vitlens.models.anatomy import Anatomy
from vitlens.models.model import Model
from vitlens.shapes import PrefixKind, TokenLayout

_STEPS = 1024  # the number of an image is its first pixel times this
# the kinds of special tokens, by their number
PREFIXES: dict[int, tuple[PrefixKind, ...]] = {
    0: (),
    1: ("cls",),
    5: ("cls", "register", "register", "register", "register"),
}


class Prepared(nn.Module):
    """A layer of attention that answers with the weights it was made with, image by image."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.num_heads = weights.shape[1]
        self.weights = weights  # (images, heads, query, key)
        self.inside = nn.Identity()  # the lens watches modules that have children

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        # modulo, as the noise of a check has any pixels; the lens sees this softmax
        torch.softmax(self.weights[numbers % len(self.weights)].log(), -1)
        return self.inside(tokens)


class Block(nn.Module):
    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.attn = Prepared(weights)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        return self.attn(tokens, numbers)


class Answering(nn.Module):
    """Blocks of prepared attention; the stream is a row of ones for every token."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(weights) for weights in layers)
        self.tokens = layers[0].shape[-1]

    def forward(self, images: Tensor) -> Tensor:
        numbers = (images[:, 0, 0, 0] * _STEPS).round().long()
        tokens = images.new_ones(len(images), self.tokens, 3)
        for block in self.blocks:
            tokens = block(tokens, numbers)
        return tokens.mean(1)


def made_model(
    *layers: Tensor, grid: tuple[int, int], prefix: int = 0, patch_size: tuple[int, int] = (4, 4)
) -> Model:
    """Return a model with these weights (images, heads, query, key) by layer, of row sum 1."""
    layout = TokenLayout(grid, patch_size, PREFIXES[prefix])
    anatomy = Anatomy(
        "vit", tuple(f"blocks.{layer}" for layer in range(len(layers))), layout, "mean"
    )
    return bare(Answering(layers), layout.image_size, anatomy=anatomy, classes=("a", "b", "c"))


def numbered(model: Model, count: int) -> Tensor:
    """Return the images that a made model knows by number, (count, 3, height, width)."""
    numbers = torch.arange(count, dtype=torch.float32) / _STEPS
    return numbers.view(-1, 1, 1, 1).expand(count, 3, *model.input_size).contiguous()


def uniform(images: int, heads: int, tokens: int) -> Tensor:
    return torch.full((images, heads, tokens, tokens), 1 / tokens)


def random_weights(
    images: int, heads: int, tokens: int, *, seed: int = 0, sharpness: float = 2.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(images, heads, tokens, tokens, generator=generator)).softmax(-1)


def curve(*accuracies: float, n: int = 100) -> Outcomes:
    """Return a curve with these accuracies over the number of removed heads.

    Images fail from the last one on.
    """
    counts = (torch.tensor(accuracies)[:, None] * n).round()  # (sets, 1)
    correct = torch.arange(n) < counts  # (sets, images)
    units = tuple(Unit("head", 0, head) for head in range(len(accuracies) - 1))
    sets = tuple(units[:count] for count in range(len(accuracies)))
    losses = torch.zeros(len(sets), n).double()
    labels = torch.zeros(n).long()
    return Outcomes(sets, "mean", labels, losses[0], correct[0], losses, correct, 1.0)
