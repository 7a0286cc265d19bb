"""A model whose truth is known: its logits are weighted sums of pixels, so what each patch is worth is its own sum."""

import torch
from torch import Tensor, nn

from vitlens.models.anatomy import Anatomy
from vitlens.models.model import Model, Provenance
from vitlens.preprocessing import Preprocessing

SIZE, GRID = (16, 16), (8, 8)  # what a CNN of this size is taken apart into: patches of 2 px


class Sums(nn.Module):
    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)  # (classes, 3, height, width)

    def forward(self, images: Tensor) -> Tensor:
        return torch.einsum("bchw,kchw->bk", images, self.weights)


def linear_model(seed: int = 0, scale: float = 0.2) -> Model:
    weights = scale * torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(seed))
    weights[1:] = 0  # the first class alone looks at the image
    return Model(
        Sums(weights),
        alias="linear",
        anatomy=Anatomy("cnn", ("inner",)),
        preprocessing=Preprocessing(SIZE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        classes=("a", "b", "c"),
        provenance=Provenance("linear", "random"),
        architecture={},
    ).eval()


def worth(model: Model, images: Tensor) -> Tensor:
    """What the first logit loses when each patch turns black: (batch, rows, columns)."""
    parts = (images * model.module.weights[0]).sum(1).detach()
    rows, columns = SIZE[0] // GRID[0], SIZE[1] // GRID[1]
    return parts.unflatten(2, (-1, columns)).sum(3).unflatten(1, (-1, rows)).sum(2)
