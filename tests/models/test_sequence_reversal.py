"""Attention without positions cannot reverse a sequence; with positions in queries and keys it learns to."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.models.attention import MultiHeadSelfAttention, attention_weights, scaled_dot_product_attention

BATCH, LENGTH, WIDTH, HEADS, STEPS = 32, 10, 64, 4, 1000


def sequences(generator: torch.Generator, batches: int = 1) -> Tensor:
    return torch.randn(BATCH * batches, LENGTH, WIDTH, generator=generator)


def learn_to_reverse(model: nn.Module, generator: torch.Generator) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        data = sequences(generator)
        optimiser.zero_grad()
        F.mse_loss(model(data), data.flip(1)).backward()
        optimiser.step()


@torch.no_grad()
def fresh_error(model: Callable[[Tensor], Tensor], generator: torch.Generator) -> tuple[float, float]:
    """Mean squared error on 100 fresh batches, and the variance of their data."""
    data = sequences(generator, batches=100)
    return F.mse_loss(model(data), data.flip(1)).item(), data.var().item()


class PositionedAttention(nn.Module):
    """Learned positions added to what queries and keys are made of; the values are the data."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def weights(self, data: Tensor) -> Tensor:
        return attention_weights(*self._queries_and_keys(data))

    def forward(self, data: Tensor) -> Tensor:
        read = scaled_dot_product_attention(*self._queries_and_keys(data), _split(data))
        return read.transpose(1, 2).flatten(2)

    def _queries_and_keys(self, data: Tensor) -> tuple[Tensor, Tensor]:
        placed = data + self.positions
        return _split(self.query(placed)), _split(self.key(placed))


def _split(tokens: Tensor) -> Tensor:
    return tokens.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def mean_of_the_others(data: Tensor) -> Tensor:
    return (data.sum(1, keepdim=True) - data) / (LENGTH - 1)


# Why 8/9. Attention alone is permutation-equivariant: its output at i depends on x_i and on the other n - 1 tokens as a
# set. The order of independent tokens is a coin toss, so given x_i and that set the wanted token x_{n+1-i} (never x_i
# itself, n being even) is any of the n - 1 others with equal chance. The best guess is then their mean, and what is
# left is their variance around their own mean: (1 - 1/(n - 1)) of the data's, (n - 2)/(n - 1) = 8/9 for n = 10.
def test_attention_alone_cannot_reverse() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = MultiHeadSelfAttention(WIDTH, HEADS)
    before, _ = fresh_error(model, generator)
    learn_to_reverse(model, generator)
    error, variance = fresh_error(model, generator)
    assert error >= 8 / 9 * variance
    assert error < before  # it did learn: what can be learned is the mean of the others
    assert error < 0.91 * variance


def test_the_mean_of_the_others_leaves_eight_ninths() -> None:
    error, variance = fresh_error(mean_of_the_others, torch.Generator().manual_seed(2))
    assert abs(error / variance - 8 / 9) < 0.005  # 2 million numbers: sampling moves it by about 0.001


def test_positions_in_queries_and_keys_reverse() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = PositionedAttention()
    learn_to_reverse(model, generator)
    error, _ = fresh_error(model, generator)
    assert error < 0.01
    weights = model.weights(sequences(generator))  # (batch, heads, query, key)
    anti_diagonal = torch.arange(LENGTH - 1, -1, -1)
    assert (weights.mean(0).argmax(-1) == anti_diagonal).all()
    assert weights.flip(-1).diagonal(dim1=-2, dim2=-1).mean() > 0.95
